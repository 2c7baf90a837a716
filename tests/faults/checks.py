"""Which tests a fault in a file meets.

The file's own, and if they do not see it, those that its mistakes reach.
"""

from __future__ import annotations

SERVER = "tests/aggregation/test_server_update.py"
HOOKS, THREADS = "tests/test_callback_list.py", "tests/engines/test_threads.py"
BUFFERS = "tests/callbacks/test_personal_methods.py"
LOOKS = "tests/client/test_forward_hooks.py"
STEPS, CHOICES = "tests/client/test_gradient_at.py", "tests/round/test_selection.py"
ENDS, TAKEN = "tests/round/test_round_hooks.py", "tests/round/test_steps.py"
ROWS = "tests/round/test_rows_of_states.py"
ORACLE, CONTRACTS = "tests/callbacks/test_oracle_agreement.py", "tests/contracts"
ADAPTERS = "tests/callbacks/test_adapters.py"
AT_SITES = "tests/deploy/test_adapters.py"
GPU = "tests/engines/test_gpu.py"
DECENTRALISED = [
    "tests/callbacks/test_decentralised.py",
    "tests/callbacks/test_decentralised_oracle.py",
]
ROUND = [SERVER, "tests/test_loop_saved.py", "tests/test_loop.py", ORACLE]
CORE: dict[str, list[str]] = {
    "fl_lightning/schedules.py": ["tests/test_schedules.py", "fl_lightning/schedules.py"],
    "fl_lightning/round/cohort.py": [
        "tests/round/test_cohort.py",
        "tests/engines/trials/test_trials.py",
        TAKEN,
    ],
    "fl_lightning/round/context.py": [
        "tests/round/test_context.py",
        "tests/client/test_client_scheduler.py",
        SERVER,
        BUFFERS,
    ],
    "fl_lightning/round/model_parts.py": [
        "tests/round/test_model_parts.py",
        "tests/callbacks/test_partial_averaging.py",
        ORACLE,
    ],
    "fl_lightning/round/transaction.py": [SERVER, ROWS, ORACLE],
    "fl_lightning/round/clients.py": [
        HOOKS,
        STEPS,
        "tests/callbacks/test_clustered_models.py",
        "tests/callbacks/test_record_privacy.py",
        ORACLE,
    ],
    "fl_lightning/round/client_group.py": [HOOKS, STEPS, ORACLE],
    "fl_lightning/aggregation/over_processes.py": ["tests/aggregation/test_over_processes.py", GPU],
    "fl_lightning/aggregation/traffic.py": [
        "tests/systems/test_training.py",
        ENDS,
        ROWS,
        "tests/callbacks/test_compositions.py",
        ORACLE,
    ],
    "fl_lightning/aggregation/update_accumulator.py": [
        "tests/aggregation/test_update_accumulator.py",
        "tests/client/test_learner_metrics.py",
        BUFFERS,
        ENDS,
        "tests/callbacks/test_personal_methods.py",
        *ROUND,
        "tests/systems/test_training.py",
    ],
    "fl_lightning/aggregation/server_update.py": [
        *ROUND,
        "tests/systems/test_training.py",
        "tests/aggregation/test_gathering.py",
        "tests/callbacks/test_partial_averaging.py",
        "tests/callbacks/test_differential_privacy.py",
        ADAPTERS,
    ],
    "fl_lightning/storage/client_rows.py": ["tests/storage/test_client_rows.py"],
    "fl_lightning/client/local_step.py": [
        "tests/client/test_local_step.py",
        HOOKS,
        STEPS,
        ENDS,
        "tests/client/test_client_scheduler.py",
        "tests/learner/test_learner_hooks.py",
        "tests/callbacks/test_robust_aggregation.py",
        "tests/callbacks/test_record_privacy.py",
        LOOKS,
    ],
    "fl_lightning/client/client_trainer.py": [
        "tests/client/test_client_trainer.py",
        "tests/client/test_local_step.py",
        "tests/client/test_learner_metrics.py",
        "tests/engines/fast/test_capture.py",
        "tests/callbacks/test_partial_averaging.py",
        STEPS,
        SERVER,
        HOOKS,
        THREADS,
        GPU,
    ],
    "fl_lightning/engines/engine_plan.py": ["tests/engines/test_choice.py"],
    "fl_lightning/engines/auto.py": ["tests/engines/test_auto.py"],
    "fl_lightning/engines/registry.py": [
        "tests/engines/test_choice.py",
        THREADS,
        "tests/engines/test_unequal_clients.py",
        GPU,
    ],
    "fl_lightning/engines/choice.py": [
        "tests/engines/test_choice.py",
        "tests/engines/trials/test_trials.py",
        "tests/engines/test_auto.py",
        THREADS,
        "tests/engines/test_unequal_clients.py",
        "tests/client/test_frozen_parameters.py",
    ],
    "fl_lightning/engines/trials/trial_steps.py": [
        "tests/engines/trials/test_trials.py",
        "tests/engines/test_hidden_state.py",
        "tests/client/test_frozen_parameters.py",
    ],
    "fl_lightning/learner/attributes.py": [
        "tests/learner/test_attributes.py",
        "tests/engines/test_hidden_state.py",
        "tests/engines/fast/test_capture.py",
    ],
    "fl_lightning/virtual/buffered.py": ["tests/systems"],
    "fl_lightning/virtual/conditions.py": ["tests/systems"],
    "fl_lightning/virtual/devices.py": ["tests/systems"],
    "fl_lightning/virtual/planned_round.py": ["tests/systems"],
    "fl_lightning/loop.py": [
        "tests/systems/test_training.py",
        "tests/test_loop_round.py",
        "tests/test_loop.py",
        "tests/aggregation",
        ENDS,
        "tests/test_schedules.py",
        HOOKS,
        CHOICES,
        STEPS,
        "tests/test_loop_saved.py",
        "tests/test_seen_by_callbacks.py",
        "tests/client/test_client_scheduler.py",
        "tests/callbacks/test_differential_privacy.py",
        "tests/callbacks/test_compositions.py",
        GPU,
    ],
    "datamodules/partitions/partition.py": [
        "tests/datamodules/test_partitions.py",
    ],
    "datamodules/partitions/label_skew.py": [
        "tests/datamodules/test_partitions.py",
    ],
}
OF_2026 = "tests/callbacks/test_oracle_of_2026.py"
LOGGERS = "tests/callbacks/test_model_loggers.py"
LOOKING = "tests/callbacks/test_identities.py"
COMPRESSION = "tests/callbacks/test_compression.py"
METHODS = [
    ORACLE,
    "tests/callbacks/test_refusals.py",
    "tests/callbacks/test_identities.py",
    "tests/callbacks/test_clustered_models.py",
    "tests/callbacks/test_compositions.py",
    COMPRESSION,
    "tests/callbacks/test_partial_averaging.py",
    LOGGERS,
    "tests/callbacks/test_robust_aggregation.py",
    "tests/callbacks/test_power_of_choice.py",
    "tests/callbacks/test_differential_privacy.py",
    "tests/callbacks/test_record_privacy.py",
    "tests/callbacks/test_personal_methods.py",
    "tests/callbacks/test_per_client_evaluation.py",
    CONTRACTS,
    GPU,
]
OWN = {  # where neither the test of its name nor the oracle sees most of it
    "byzantine_clients": ORACLE,
    "communication_logger": "tests/callbacks/test_compositions.py",
    "consensus_distance_logger": LOGGERS,
    "drift_logger": LOGGERS,
    "global_loss_logger": LOGGERS,
    "hessian_logger": LOGGERS,
    "error_feedback_21": COMPRESSION,
    "low_rank_update": COMPRESSION,
    "quantized_broadcast": COMPRESSION,
    "quantized_update": COMPRESSION,
    "random_epochs": TAKEN,
    "random_k": COMPRESSION,
    **dict.fromkeys(("factor_schedule", "padded_ranks", "truncated_product"), ADAPTERS),
    **dict.fromkeys(("stacked_adapters", "residual_merge", "corrected_factor"), ADAPTERS),
    "sign_update": COMPRESSION,
    **dict.fromkeys(("aligned_duals", "augmented_models", "dynamic_regularization"), OF_2026),
    **dict.fromkeys(("decorrelated_features", "trajectory_distillation"), OF_2026),
    **dict.fromkeys(("discrepancy_weights", "soap_direction", "update_memory"), OF_2026),
    **dict.fromkeys(("orthogonal_factor", "scaled_heads"), OF_2026),
}


def of_method(file: str) -> list[str]:
    """The tests that a fault in a callback meets.

    Its own first, which are the oracle's where it has none by name.
    """
    name = file.rpartition("/")[2].removesuffix(".py")
    named = f"tests/callbacks/test_{name}.py"
    own = OWN.get(name, named if named in METHODS else ORACLE)
    return [own, *(check for check in METHODS if check != own)]


OTHERS: dict[str, list[str]] = {  # files of named faults alone
    "fl_lightning/client/linear_factors.py": [
        "tests/client/test_linear_factors.py",
        "tests/callbacks/test_record_privacy.py",
    ],
    "fl_lightning/client/sample_gradients.py": [
        "tests/client/test_linear_factors.py",
        "tests/callbacks/test_record_privacy.py",
    ],
    "fl_lightning/aggregation/exchange.py": DECENTRALISED,
    "fl_lightning/round/neighbourhood.py": DECENTRALISED,
    **{
        f"callbacks/decentralised/{name}.py": DECENTRALISED
        for name in ("gossip", "gradient_tracking", "push_sum", "without_server")
    },
    "fl_lightning/learner/adapters.py": [ADAPTERS],
    "fl_lightning/round/base_weights.py": [ADAPTERS],
    "fl_lightning/round/low_rank.py": [ADAPTERS],
    "fl_lightning/round/partial_training.py": [ADAPTERS],
    "fl_lightning/deploy/sent_model.py": [AT_SITES],
    "fl_lightning/callback.py": [ENDS, "tests/callbacks/test_clustered_models.py"],
    "fl_lightning/round/declared_state.py": [ROWS, SERVER],
    "fl_lightning/module.py": [TAKEN],
    "fl_lightning/checkpoint.py": [
        "tests/storage/test_resume.py",
        "tests/systems/test_training.py",
    ],
    "fl_lightning/engines/sequential.py": [
        "tests/aggregation/test_update_accumulator.py",
        "tests/test_module.py",
    ],
    "fl_lightning/learner/taps.py": [LOOKS],
    "fl_lightning/machine/random_state.py": [LOOKS, STEPS],
    "fl_lightning/client/forward_hooks.py": [LOOKS, LOOKING, ORACLE],
    "fl_lightning/client/flat_learner.py": [LOOKS, LOOKING, ORACLE, GPU],
    "fl_lightning/callback_list.py": [LOOKS, ORACLE],
    "fl_lightning/evaluation/personal_models.py": ["tests/callbacks/test_per_client_evaluation.py"],
    "fl_lightning/storage/run_state.py": [CHOICES],
    "fl_lightning/round/quantization.py": [COMPRESSION],
    "fl_lightning/round/server.py": [CHOICES, GPU],
    "fl_lightning/evaluation/in_round.py": ["tests/evaluation/test_in_round.py"],
    "fl_lightning/round/global_model.py": ["tests/round/test_global_model.py"],
    "fl_lightning/client/gradient_accumulation.py": [GPU],
    "fl_lightning/client/client_optimizer.py": [GPU],
    "fl_lightning/engines/engine_context.py": [GPU],
    "fl_lightning/engines/fast/capture.py": [GPU],
    "fl_lightning/engines/fast/gpu_streams.py": [GPU],
    "fl_lightning/machine/device_memory.py": [GPU],
    "fl_lightning/machine/federated_strategy.py": [GPU],
    "fl_lightning/aggregation/metric_states.py": [GPU],
    "fl_lightning/evaluation/evaluator.py": [GPU],
}
