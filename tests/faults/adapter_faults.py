"""Faults in methods for adapters, in the base that they change, and in what sites are sent."""

from __future__ import annotations

from tests.faults.faults_list import Fault

BASE, SENT = "fl_lightning/round/base_weights.py", "fl_lightning/deploy/sent_model.py"
LOW_RANK, FLORA = "fl_lightning/round/low_rank.py", "callbacks/adapters/stacked_adapters.py"

ADAPTER_FAULTS = [
    Fault(
        "RoLoRA: A comes first",
        [
            (
                "callbacks/adapters/factor_schedule.py",
                "self.factors[t % len(self.factors)]",
                "self.factors[(t + 1) % len(self.factors)]",
            )
        ],
    ),
    Fault(
        "FLoRA: B goes on from the mean",
        [
            (
                FLORA,
                "received.put(update, adapter, *adapter.matrices(new))",
                "received.put(update, adapter, adapter.matrices(new)[0], left[:, : adapter.rank])",
            )
        ],
    ),
    Fault(
        "FLoRA: A is drawn as in the round before",
        [(FLORA, "server.layout, server.round + 1)", "server.layout, server.round)")],
    ),
    Fault(
        "FedEx-LoRA: the residual is that of all B, not of what differs from the mean",
        [(LOW_RANK, "p * (b - mean_b)", "p * b")],
    ),
    Fault(
        "FlexLoRA: Σ goes into A",
        [
            (
                LOW_RANK,
                "torch.where(there, (u * signs * sigma)[:, :k], 0.0)",
                "torch.where(there, (u * signs)[:, :k], 0.0)",
            )
        ],
    ),
    Fault(
        "HetLoRA: the server weighs by squared norms",
        [("callbacks/adapters/padded_ranks.py", "norms = squares.sqrt()", "norms = squares")],
    ),
    Fault(
        "LoRA-FAIR: λ is left out",
        [
            (
                "callbacks/adapters/corrected_factor.py",
                "a @ a.T + self.penalty * ",
                "a @ a.T + 0.0 * ",
            )
        ],
    ),
    Fault(
        "an adapter's scale is left out of what the base gets",
        [
            (
                "fl_lightning/learner/adapters.py",
                "return self.scale * left, right",
                "return left, right",
            )
        ],
    ),
    Fault(
        "the base's additions cost no more than their factors",
        [(BASE, "numbers = min(one.shape[1] * sum(value.shape), numbers)", "numbers = 0")],
    ),
    Fault(
        "the mean over holders is that over all",
        [("fl_lightning/aggregation/server_update.py", 'rule == "holders":', 'rule == "all":')],
    ),
    Fault(
        "a site applies the latest round's additions alone",
        [
            (
                SENT,
                "history[t] for t in range(since, now)",
                "history[t] for t in range(max(since, now - 1), now)",
            )
        ],
    ),
    Fault(
        "a site takes additions to whatever base it has",
        [(SENT, "not in (ANY, self.mark)", "in ()")],
    ),
]
