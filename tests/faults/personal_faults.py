"""Faults of personal models and of evaluation by client, to be planted by hand."""

from __future__ import annotations

from tests.faults.faults_list import Fault

FEDREP, DITTO, PFEDME = (
    f"callbacks/personal/{name}.py"
    for name in ("alternating_head", "proximal_personal_model", "moreau_envelope")
)
EVALUATION, MODELS = (
    "callbacks/loggers/per_client_evaluation.py",
    "fl_lightning/evaluation/personal_models.py",
)

PERSONAL_FAULTS = [
    Fault(
        "FedRep: what rests is not put back after the optimizer's step",
        [
            (
                FEDREP,
                "clients.x = torch.where(self.resting(clients), self.before[clients], clients.x)",
                "pass",
            )
        ],
    ),
    Fault(
        "FedRep: the body comes first",
        [(FEDREP, "[clients] ^ trains_head", "[clients] == trains_head")],
    ),
    Fault("Ditto: v follows the gradient at x", [(DITTO, "clients.gradient_at(v)", "gradient")]),
    Fault(
        "Ditto: the pull goes to where the client started",
        [(DITTO, "(v - clients.w)", "(v - clients.start)")],
    ),
    Fault(
        "pFedMe: θ goes on from the client's latest round",
        [(PFEDME, "self.theta[clients] = clients.w", "pass")],
    ),
    Fault(
        "pFedMe: θ is pushed away from x", [(PFEDME, "(theta - clients.x)", "(clients.x - theta)")]
    ),
    Fault(
        "FedBN: clients start from the server's buffers",
        [
            (
                "fl_lightning/round/context.py",
                "        if not self.own_buffers:\n",
                "        if True:\n",
            )
        ],
    ),
    Fault(
        "clients/*: the worst 10 % are the best",
        [(EVALUATION, "descending=not greater", "descending=greater")],
    ),
    Fault(
        "personal models: a method is asked for clients that never finished a round",
        [(MODELS, " and (finished or self.methods.personal_of_all)", "")],
    ),
    Fault(
        "personal models: a part that was just averaged is still the client's",
        [(MODELS, "t=round.t + 1", "t=round.t")],
    ),
]
