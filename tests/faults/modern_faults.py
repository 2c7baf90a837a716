"""Faults of the methods of 2023 to 2026: each is a slip of a published code."""

from __future__ import annotations

from tests.faults.faults_list import Fault

ADAM = "callbacks/directions/adam_direction.py"
MUON = "callbacks/directions/muon_direction.py"
GLOBAL = "callbacks/directions/global_direction.py"
AHEAD = "callbacks/server/lookahead_momentum.py"
GUIDED = "callbacks/sharpness/momentum_guided_perturbation.py"
ASCENT = "callbacks/sharpness/server_ascent.py"
ALA = "callbacks/personal/adaptive_local_aggregation.py"
APFL = "callbacks/personal/mixed_personal_model.py"
ROD = "callbacks/personal/personal_head.py"
PROTO = "callbacks/personal/prototype_pull.py"
META = "callbacks/personal/meta_gradient.py"
PRIVACY = "callbacks/robust/differential_privacy.py"
STEP = "fl_lightning/client/local_step.py"

MODERN_FAULTS = [
    Fault(
        "FedAdamW: the step counts on over rounds for both moments",
        [
            (
                ADAM,
                "(clients.step + 1).double()",
                "(clients.step + 1 + 100 * clients.round).double()",
            )
        ],
    ),
    Fault(
        "FedAdamW: all of v is sent",
        [(ADAM, 'if self.share == "rows" and len(shape) >= 2 else 1', "if True else 1")],
    ),
    Fault(
        "FedAdamW: clients start with v = 0",
        [(ADAM, "self.v[clients] = self.second_mean[block]", "pass")],
    ),
    Fault(
        "FedAdamW: the share of zeros is not carried over rounds",
        [(ADAM, 'share * getattr(self, f"{moment}_faded").mean()', "share")],
    ),
    Fault(
        "FedLADA: the direction is added, not mixed",
        [(GLOBAL, "direction.mul_(1 - self.alpha)", "pass")],
    ),
    Fault(
        "FedMuon: weight decay is scaled with matrices",
        [(MUON, "return s[self.adjust] * self.matrix_lr_scale", "return s[self.adjust]")],
    ),
    Fault(
        "FedMuon-LMO: the server's variate is over participants",
        [(MUON, "self.sent.sum() / server.num_clients", "self.sent.sum() / server.n")],
    ),
    Fault(
        "Muon: wide matrices are scaled in place of tall ones",
        [(MUON, "math.sqrt(max(1, a / b))", "math.sqrt(max(1, b / a))")],
    ),
    Fault(
        "FedACG: the server's own momentum is not added",
        [(AHEAD, "server.update += ahead", "pass")],
    ),
    Fault(
        "FedWMSAM: the perturbation points the other way",
        [
            (
                GUIDED,
                "away = clients.w + clients.step * self.guide[clients] - clients.x",
                "away = clients.x - clients.w - clients.step * self.guide[clients]",
            )
        ],
    ),
    Fault(
        "FedWMSAM: the norm sums absolute values",
        [(GUIDED, "self.radius / clients.norm(away)", "self.radius / away.abs().sum(1, True)")],
    ),
    Fault(
        "FedSWA: the client doubles its rate",
        [
            (
                "callbacks/drift/decay_within_round.py",
                "rate: Tensor = 1 - clients.step",
                "rate: Tensor = 2 - clients.step",
            )
        ],
    ),
    Fault(
        "FedMoSWA: the mean gradient divides by η K",
        [
            (
                "fl_lightning/round/client_group.py",
                "        if self.rates_used is not None:\n            here = ",
                "        if self.rates_used is not None:\n            _ = ",
            )
        ],
    ),
    Fault(
        "FedMoSWA: what is sent is relative to c_i",
        [
            (
                "callbacks/drift/control_variates.py",
                "change = self.c_i[clients] - self.c\n",
                "pass\n",
            )
        ],
    ),
    Fault(
        "FedGloSS: the perturbation climbs along the update",
        [(ASCENT, "server.w - scale", "server.w + scale")],
    ),
    Fault(
        "APFL: the gradient is taken at v",
        [(APFL, "clients.gradient_at(middle)", "clients.gradient_at(v)")],
    ),
    Fault(
        "FedALA: all layers are learned",
        [(ALA, 'layout.named(self.parts_, "AdaptiveLocalAggregation")', "[*layout]")],
    ),
    Fault(
        "FedBABU: weight decay moves the head",
        [
            (
                "callbacks/personal/fixed_head.py",
                "clients.x = torch.where(self.of_head[clients], clients.start, clients.x)",
                "pass",
            )
        ],
    ),
    Fault(
        "FedProto: clients are pulled to 0 for classes that nobody had",
        [(PROTO, "(far * self.a[batch[1]]).mean()", "far.mean()")],
    ),
    Fault(
        "FedProto: prototypes that nobody had are forgotten",
        [(PROTO, "torch.where(counts[:, None] > 0, means, self.P)", "means")],
    ),
    Fault(
        "FedRoD: the personal logits leave out those of the head",
        [(ROD, 'seen["logits"].detach() + f @ head.mT', "f @ head.mT")],
    ),
    Fault(
        "Per-FedAvg: the second step has the rate of the first",
        [(META, "(ahead - behind) / (2 * self.delta)", "(ahead - behind) / self.delta")],
    ),
    Fault(
        "q-FedAvg: the loss is that of another model",
        [
            (
                "callbacks/server/fair_aggregation.py",
                "clients.evaluate(clients.w)",
                "clients.evaluate(clients.w * 0.9)",
            )
        ],
    ),
    Fault(
        "adaptive clipping: clipped updates are counted",
        [(PRIVACY, "(self._norm(update.double()) <= ", "(self._norm(update.double()) > ")],
    ),
    Fault(
        "adaptive clipping: the sum has the noise of the whole round",
        [
            (
                PRIVACY,
                "of_sum: float = (sigma**-2 - (2 * deviation) ** -2) ** -0.5",
                "of_sum = sigma",
            )
        ],
    ),
    Fault(
        "the direction of a step is that of the gradient",
        [
            (
                STEP,
                "return self.trained_part(self.after(self.directions, gradient))",
                "return self.trained_part(self.after(self.directions[1:], gradient))",
            )
        ],
    ),
]
