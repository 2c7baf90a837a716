"""Which tests are `make test`, the fast tier, and which only `make test-all` runs.

A test is of the whole tier if it is marked ``slow``: it starts real processes, or trains for
seconds; and where one of its parameters is ``concurrent``, whose bits are those of the sequential
engine by tests of their own. TIERS says what differs from that; of two entries the longer one
holds. An entry is the beginning of a test's id: a folder, a file, a test, or a test with its first
parameters. A new method gets its contracts, its oracle's second engine and its row of every engine
in the whole tier, without an entry.
"""

from __future__ import annotations

import re

FAST, WHOLE = "fast", "whole"
CONTRACT = "tests/contracts/test_contracts.py::test_our_methods_keep_the_contracts"
ORACLE = "tests/callbacks/test_oracle_agreement.py::test_method_agrees_with_the_oracle"

# Between them these methods have every hook of a local step, every kind of declared state, parts,
# coding, selection and what is broadcast.
CONTRACTS_OF = [
    "AlternatingHead",
    "ClusteredModels",
    "ControlVariates",
    "DecayWithinRound",
    "FedMuon",
    "GlobalDirection",
    "LowRankUpdate",
    "MixedAscent",
    "ModelContrast",
    "PowerOfChoice",
    "QuantizedBroadcast",
]

# What the fast tier does without, by the reason.
LEFT_OUT = [
    # every method, every pair of methods, every engine
    f"{ORACLE}[samples-",
    f"{ORACLE}[stacked-",
    f"{ORACLE}[poisson-",
    "tests/callbacks/test_compression.py::test_a_server_needs_the_counted_bytes",
    "tests/callbacks/test_method_files.py::test_the_method_that_the_docs_name",
    "tests/callbacks/test_identities.py::test_fedlesam",
    "tests/callbacks/test_table_of_costs.py",
    "tests/contracts/test_contracts.py::test_the_report_is_a_table",
    "tests/engines/test_every_method.py",
    "tests/contracts/test_contracts.py::test_a_method_that_reads_label_counts",
    "tests/engines/test_forked.py::test_auto_takes_processes",
    "tests/engines/test_forked.py::test_what_fails_in_a_worker_alone",
    "tests/client/test_frozen_parameters.py::test_what_steps_write_follows_the_rule_of_buffers",
    "tests/engines/test_hidden_state.py::test_auto_leaves_the_bits_of_sequential",
    "tests/client/test_forward_hooks.py::test_what_looks_cost_is_counted[given1]",
    "tests/engines/test_unequal_clients.py::test_clients_that_finish_early",
    "tests/oracles",
    "tests/systems/test_schedule.py::test_the_schedule_is_that_of_another_program",
    # recorded steps, which only save time: their bits are those of steps that are not recorded
    "tests/engines/fast",
    # papers' tables and their replays, reports of real runs, figures
    "fl_lightning/testing.py",
    "tests/benchmarks",
    "tests/report/test_files.py",
    "tests/report/test_real_runs.py",
    # every pair of a learner and data, every odd option
    "tests/cli/test_any_data_any_model.py",
    "tests/cli/test_cli.py::test_events_beside_another_logger",
    "tests/cli/test_cli.py::test_names_of_folders",
    "tests/cli/test_errors.py::test_an_empty_section",
    "tests/cli/test_errors.py::test_checkpoint",
    "tests/cli/test_errors.py::test_option",
    "tests/cli/test_fuzz.py",
    "tests/cli/test_going_on.py",
    "tests/cli/test_learner_config.py",
    "tests/cli/test_one_run_a_folder.py",
    "tests/cli/test_personal.py",
    "tests/storage/test_state_folder.py",
    "tests/datamodules/test_datasets.py::test_real",
    # at any line, at any byte, in every engine
    "tests/storage/test_checkpoint_io.py::test_every_flipped_bit_is_found_or_harmless",
    "tests/storage/test_segments.py::test_every_flipped_bit_is_found_or_harmless",
    "tests/storage/test_client_store.py::test_any_sequence_of_operations_equals_a_dict",
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
    "tests/callbacks/test_record_privacy.py::test_an_attacker_finds_less",
    "tests/callbacks/test_record_privacy.py::test_epsilon_is_the_library_s",
    "tests/callbacks/test_record_privacy.py::test_the_least_noise_is_found",
    "tests/callbacks/test_record_privacy.py::test_resumed_and_in_two_processes",
    "tests/callbacks/test_differential_privacy.py::test_a_target_alone",
    "tests/callbacks/test_differential_privacy.py::test_it_is_logged_each_round",
    "tests/callbacks/test_differential_privacy.py::test_little_noise_has_its_price",
    "tests/callbacks/test_differential_privacy.py::test_rounds_of_less_privacy",
    "tests/callbacks/test_differential_privacy.py::test_the_round_is_algorithm_1[0.7",
    "tests/callbacks/test_differential_privacy.py::test_the_least_noise_is_found",
    "tests/callbacks/test_differential_privacy.py::test_what_is_spent_agrees_with_two",
    "tests/callbacks/test_private_runs.py",
    "tests/evaluation/test_curvature.py",
    # several hosts and processes, the C library, packages, texts
    "tests/aggregation/test_over_processes.py::test_real_processes",
    "tests/datamodules/test_own_generators.py::test_a_resumed_run_and_clients_side_by_side",
    "tests/datamodules/test_reading_ahead.py",
    "tests/client/test_learner_metrics.py::test_metrics_are_the_same_on_two_processes",
    "tests/faults",
    "tests/machine",
    "tests/models/test_models.py::test_importing_a_small_network_is_light",
    "tests/storage/test_resume.py::test_killed_and_resumed_on_two_processes",
    "tests/storage/test_resume.py::test_rows_reach_who_trains",
    "tests/test_loop.py::test_one_of_two_processes_fails",
    "tests/test_seen_by_callbacks.py::test_a_compiled_learner_is_refused",
    "tests/test_notebook.py",
    "tests/test_packaging.py",
    "tests/test_pages.py",
]

# What stays of these, and real processes of which the fast tier has one of each kind.
KEPT = [
    # classes that nobody of a round has
    f"{ORACLE}[poisson-FedProto]",
    "tests/cli/test_going_on.py::test_a_failing_resume_leaves_the_config",
    "tests/cli/test_going_on.py::test_a_finished_run_says",
    "tests/cli/test_going_on.py::test_a_run_that_early_stopping_ended_stays_ended[patience",
    "tests/cli/test_going_on.py::test_other_settings_are_refused",
    "tests/cli/test_learner_config.py::test_only_a_learner_with_objects",
    "tests/cli/test_one_run_a_folder.py::test_a_killed_run_leaves_no_lock",
    "tests/cli/test_personal.py::test_a_client_is_exported_by_its_name",
    "tests/deploy/test_few_samples.py::test_a_client_with_few_test_samples",
    "tests/deploy/test_few_samples.py::test_only_clients_with_enough_samples",
    "tests/deploy/test_what_leaves.py::test_the_list_has",
    "tests/deploy/test_what_leaves.py::test_the_readme",
    "tests/machine/test_lost_rank.py::test_a_run_without_a_stopped_rank_ends_and_resumes",
]

# What stays of a test's cases: the beginnings of their parameters.
CASES = {
    CONTRACT: [f"{name}]" for name in CONTRACTS_OF],
    "tests/callbacks/test_compression.py::test_ten_rounds_agree_with_the_oracle": [
        "EF21, signs, all-",
        "PowerSGD, rank 2-",
    ],
    "tests/callbacks/test_power_of_choice.py::test_those_with_the_largest_known_loss": [
        "5",
        "None",
    ],
    "tests/cli/test_cli.py::test_a_signal_ends_the_run_after_its_round": ["2"],
    "tests/cli/test_help.py::test_whoever_reads_it_may_stop_early": ["1-argv2"],
    "tests/engines/test_every_method.py::test_stacked_clients_agree_with_sequential": [
        "every hook]",
        "method/fedsmoo]",
        "method/scaffold]",
    ],
    "tests/engines/test_every_method.py::test_threads_leave_the_bits_of_sequential": [
        "every hook]",
        "method/fedrep]",
    ],
    "tests/engines/test_every_method.py::test_forked_processes_leave_the_bits_of_sequential": [
        "method/scaffold]"
    ],
    "tests/engines/test_every_method.py::test_a_run_goes_on_with_the_same_or_another_engine": [
        "concurrent-concurrent-False]",
        "stacked-sequential-False]",
    ],
    "tests/engines/test_forked.py::test_a_worker_that_is_ended_leaves_one_paragraph": ["9"],
    "tests/client/test_learner_metrics.py::test_gradients_that_are_no_steps": ["method1"],
    "tests/client/test_learner_metrics.py::test_metrics_have_the_numbers": ["Updated"],
    "tests/engines/test_unequal_clients.py::test_a_client_that_diverges": ["2"],
    "tests/evaluation/test_evaluated_model.py::test_clients_and_global_values": ["both"],
    "tests/models/test_pretrained.py::test_folders_have_the_logits_of_the_export": ["opt-fedit"],
    "tests/report/test_lost.py::test_a_diverged_run_has_no_score": ["{'metric': 'val/r2'}-last]"],
    "tests/report/test_lost.py::test_a_run_whose_last_value_is_no_number_has_lost": ["[nan]-"],
    "tests/storage/test_resume.py::test_killed_and_resumed_on_one_process": ["commit"],
    "tests/systems/test_training.py::test_what_is_sent_is_complete_in_itself": ["FedAsync-top-k"],
    "tests/test_equals_lightning.py::test_every_epoch_is_plain_lightnings": [
        "momentum-sequential",
        "one cycle-sequential",
        "sgd-sequential",
    ],
    "tests/test_loop.py::test_a_round_that_was_broken_off_never_began": [
        "on_local_end",
        "on_server_update",
        "second logger",
    ],
    "tests/test_loop_saved.py::test_resumed_from_a_checkpoint_saved_in_a_hook_of_a_round": [
        "sequential-aggregate",
        "sequential-on_local_end",
        "sequential-on_round_start",
        "partial-on_server_update",
    ],
    "tests/test_loop.py::test_resumed_from_an_exceptions_checkpoint": [
        "on_local_end",
        "on_round_end",
    ],
}

TIERS = {**dict.fromkeys([*LEFT_OUT, *CASES], WHOLE), **dict.fromkeys(KEPT, FAST)}


def tier(test: str, slow: bool) -> str:
    """The tier of a test by its id.

    >>> tier("tests/engines/test_every_method.py::test_x", slow=False)
    'whole'
    >>> [tier("tests/test_loop.py::test_x", slow) for slow in (False, True)]
    ['fast', 'whole']
    >>> tier("tests/round/test_x.py::test_y[concurrent-3]", slow=False)
    'whole'
    """
    matching = [place for place in TIERS if test.startswith(place)]
    if not matching:
        return WHOLE if slow or re.search(r"[\[-]concurrent[\]-]", test) else FAST
    place = max(matching, key=len)
    given = test.partition("[")[2]
    return FAST if given.startswith(tuple(CASES.get(place, ()))) else TIERS[place]


def nothing_fast(path: str) -> bool:
    """Tell whether the fast tier needs not even to read this file or folder.

    >>> [nothing_fast(f"tests/{name}") for name in ("benchmarks", "engines/fast", "test_loop.py")]
    [True, True, False]
    """
    kept = any(place.startswith(path) for place in [*KEPT, *CASES])
    return tier(path, slow=False) == WHOLE and not kept
