"""Which tests are `make test`, the fast tier, and which only `make test-all` runs.

A test is of the whole tier if it is marked ``slow``: it starts real processes, or trains for
seconds. TIERS says what differs from that; of two entries the longer one holds. An entry is the
beginning of a test's id: a folder, a file, a test, or a test with its first parameters. A new
method gets its contracts, its oracle's second engine and its row of every engine in the whole
tier, without an entry.
"""

from __future__ import annotations

FAST, WHOLE = "fast", "whole"
CONTRACT = "tests/contracts/test_contracts.py::test_our_methods_keep_the_contracts"
ORACLE = "tests/callbacks/test_oracle_agreement.py::test_method_agrees_with_the_oracle"

# Between them these methods have every hook of a local step, every kind of declared state, parts,
# coding, selection and what is broadcast.
CONTRACTS_OF = [
    "AlternatingHead",
    "ClusteredModels",
    "ControlVariates",
    "LowRankUpdate",
    "MixedAscent",
    "ModelContrast",
    "PowerOfChoice",
    "QuantizedBroadcast",
]

# What the fast tier does without, by the reason.
LEFT_OUT = [
    # every method, every pair of methods, every engine
    CONTRACT,
    f"{ORACLE}[samples-",
    "tests/callbacks/test_byzantine_clients.py::test_every_contract_holds",
    "tests/callbacks/test_compositions.py::test_sent_parameters_of_fedals_on_resnet20",
    "tests/callbacks/test_compression.py::test_a_server_needs_the_counted_bytes",
    "tests/callbacks/test_docs.py::test_the_method_that_the_docs_write_out",
    "tests/callbacks/test_identities.py::test_fedlesam",
    "tests/callbacks/test_identities.py::test_scaffnew_reaches_the_optimum",
    "tests/callbacks/test_properties.py",
    "tests/callbacks/test_robust_aggregation.py::test_every_contract_holds",
    "tests/callbacks/test_robust_aggregation.py::test_three_of_ten",
    "tests/callbacks/test_table_of_costs.py",
    "tests/contracts/test_contracts.py::test_the_report_is_a_table",
    "tests/engines/test_every_method.py",
    "tests/engines/test_gradient_at.py::test_the_contracts_know_it",
    "tests/engines/test_hidden_state.py::test_auto_leaves_the_bits_of_sequential",
    "tests/engines/test_unequal_clients.py::test_clients_that_finish_early",
    "tests/evaluation/test_in_round.py::test_the_contracts_know_it",
    "tests/oracles",
    "tests/round/test_round_hooks.py::test_both_keep_the_contracts",
    "tests/round/test_rows_of_states.py::test_they_keep_the_contracts",
    "tests/round/test_selection.py::test_a_choice_keeps_every_contract",
    "tests/systems/test_schedule.py::test_the_schedule_is_that_of_another_program",
    "tests/systems/test_training.py::test_what_is_sent_is_complete_in_itself",
    # recorded steps, which only save time: their bits are those of steps that are not recorded
    "tests/callbacks/test_personal_methods.py::test_steps_are_recorded_with_the_same_bits",
    "tests/engines/fast",
    "tests/engines/test_gradient_at.py::test_a_step_that_asks_for_it_is_captured",
    "tests/engines/test_looks.py::test_a_captured_step_has_the_same_bits",
    "tests/round/test_steps.py::test_recorded_steps_have_the_bits_of_those_that_are_not",
    # papers' tables and their replays, reports of real runs, figures
    "fl_lightning/testing.py",
    "tests/benchmarks",
    "tests/cli/test_check.py",
    "tests/cli/test_full_tables.py",
    "tests/cli/test_small_twins.py",
    "tests/report/test_figures.py",
    "tests/report/test_files.py",
    "tests/report/test_for_reviewers.py",
    "tests/report/test_real_runs.py",
    # every pair of a learner and data, every odd option
    "tests/cli/test_any_data_any_model.py",
    "tests/cli/test_hostile.py",
    "tests/datamodules/test_datasets.py::test_real",
    # at any line, at any byte, in every engine
    "tests/storage/test_checkpoint_io.py::test_every_flipped_bit_is_found_or_harmless",
    "tests/storage/test_segments.py::test_every_flipped_bit_is_found_or_harmless",
    "tests/storage/test_store.py::test_any_sequence_of_operations_equals_a_dict",
    "tests/test_loggers.py::test_a_kill_at_any_byte",
    "tests/test_loop.py::test_fitted_again_after_an_exception",
    "tests/test_loop.py::test_in_each_engine",
    "tests/test_loop.py::test_in_the_first_and_the_last_round",
    "tests/test_loop.py::test_interrupted_by_ctrl_c_at_any_line",
    "tests/test_loop.py::test_resumed_from",
    "tests/test_loop_saved.py::test_in_each_engine",
    "tests/test_weight_averaging.py::test_a_run_resumes_to_the_same_bits",
    "tests/test_loop_saved.py::test_saved_at_any_line",
    # curvature, and what takes an accountant of privacy seconds
    "tests/callbacks/test_differential_privacy.py::test_a_target_alone",
    "tests/callbacks/test_differential_privacy.py::test_it_is_logged_each_round",
    "tests/callbacks/test_differential_privacy.py::test_little_noise_has_its_price",
    "tests/callbacks/test_differential_privacy.py::test_numpys_numbers_are_pythons",
    "tests/callbacks/test_differential_privacy.py::test_rounds_of_less_privacy",
    "tests/callbacks/test_differential_privacy.py::test_the_least_noise_is_found",
    "tests/callbacks/test_differential_privacy.py::test_what_is_spent_agrees_with_two",
    "tests/callbacks/test_private_runs.py",
    "tests/evaluation/test_curvature.py",
    # several hosts and processes, the C library, packages, texts
    "tests/aggregation/test_tree_sum.py::test_real_processes",
    "tests/callbacks/test_byzantine_clients.py::test_four_processes",
    "tests/datamodules/test_own_generators.py::test_a_resumed_run_and_clients_side_by_side",
    "tests/datamodules/test_reading_ahead.py",
    "tests/datamodules/test_texts.py::test_tinyshakespeare",
    "tests/engines/test_learner_metrics.py::test_metrics_are_the_same_on_two_processes",
    "tests/faults",
    "tests/machine",
    "tests/models/test_models.py::test_importing_a_small_network_is_light",
    "tests/storage/test_resume.py::test_killed_and_resumed_on_two_processes",
    "tests/test_notebook.py",
    "tests/test_packaging.py",
    "tests/test_pages.py",
]

# What stays of these, and real processes of which the fast tier has one of each kind.
KEPT = [
    *(f"{CONTRACT}[{name}-" for name in CONTRACTS_OF),
    "tests/engines/fast/test_stacked.py::test_stacking_changes_nothing_but_rounding",
    "tests/machine/test_lost_rank.py::test_a_stopped_rank_is_named_and_the_run_resumes",
    "tests/test_loop.py::test_resumed_from_an_exceptions_checkpoint",
]

TIERS = {**dict.fromkeys(LEFT_OUT, WHOLE), **dict.fromkeys(KEPT, FAST)}


def tier(test: str, slow: bool) -> str:
    """The tier of a test by its id.

    >>> tier("tests/engines/test_every_method.py::test_x", slow=False)
    'whole'
    >>> [tier("tests/test_loop.py::test_x", slow) for slow in (False, True)]
    ['fast', 'whole']
    """
    matching = [place for place in TIERS if test.startswith(place)]
    if not matching:
        return WHOLE if slow else FAST
    return TIERS[max(matching, key=len)]
