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

# Whole files and folders, each with the reason why the fast tier does without.
LEFT_OUT = [
    # every method, every pair of methods, every engine
    CONTRACT,
    f"{ORACLE}[samples-",
    "tests/callbacks/test_properties.py",
    "tests/callbacks/test_robust_aggregation.py::test_every_contract_holds",
    "tests/callbacks/test_byzantine_clients.py::test_every_contract_holds",
    "tests/engines/test_every_method.py",
    "tests/evaluation/test_in_round.py::test_the_contracts_know_it",
    "tests/round/test_round_hooks.py::test_both_keep_the_contracts",
    "tests/round/test_rows_of_states.py::test_they_keep_the_contracts",
    "tests/round/test_selection.py::test_a_choice_keeps_every_contract",
    # recorded steps, which only save time: their bits are those of steps that are not recorded
    "tests/callbacks/test_personal_methods.py::test_steps_are_recorded_with_the_same_bits",
    "tests/engines/fast/test_capture",
    "tests/engines/test_looks.py::test_a_captured_step_has_the_same_bits",
    "tests/round/test_steps.py::test_recorded_steps_have_the_bits_of_those_that_are_not",
    # papers' tables and their replays, reports of real runs
    "tests/benchmarks",
    "tests/cli/test_full_tables.py",
    "tests/cli/test_small_twins.py",
    "tests/report/test_files.py",
    "tests/report/test_for_reviewers.py",
    "tests/report/test_real_runs.py",
    # every pair of a learner and data, every odd option
    "tests/cli/test_any_data_any_model.py",
    "tests/cli/test_hostile.py",
    # searches by chance, curvature, what takes an accountant of privacy seconds
    "tests/callbacks/test_differential_privacy.py::test_little_noise_has_its_price",
    "tests/callbacks/test_differential_privacy.py::test_the_least_noise_is_found",
    "tests/callbacks/test_differential_privacy.py::test_what_is_spent_agrees_with_two",
    "tests/callbacks/test_private_runs.py",
    "tests/evaluation/test_curvature.py",
    "tests/storage/test_checkpoint_io.py::test_every_flipped_bit_is_found_or_harmless",
    "tests/storage/test_segments.py::test_every_flipped_bit_is_found_or_harmless",
    "tests/storage/test_store.py::test_any_sequence_of_operations_equals_a_dict",
    "tests/systems/test_schedule.py::test_the_schedule_is_that_of_another_program",
    # several hosts and processes, the C library, packages, texts
    "tests/datamodules/test_texts.py::test_tinyshakespeare",
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
    "tests/cli/test_any_data_any_model.py::test_a_round_on_digits_and_its_config",
    "tests/machine/test_lost_rank.py::test_a_stopped_rank_is_named_and_the_run_resumes",
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
