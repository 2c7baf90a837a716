"""Faults of hooks at the ends of a round, and of the methods that stand on them."""

from __future__ import annotations

from tests.faults.faults_list import Fault

LESAM = "callbacks/sharpness/locally_estimated_perturbation.py"
SPEED = "callbacks/drift/mixed_ascent.py"
EXP = "callbacks/server/extrapolated_step.py"
SKIPS = "callbacks/drift/random_skips.py"
CLUSTERS = "callbacks/personal/clustered_models.py"
STEP = "fl_lightning/client/local_step.py"
LOOP = "fl_lightning/loop.py"
TRAFFIC = "fl_lightning/aggregation/traffic.py"

HOOK_FAULTS = [
    Fault("FedLESAM: e points down the loss", [(LESAM, "(old - clients.w)", "(clients.w - old)")]),
    Fault(
        "FedLESAM: the model that was received is not kept",
        [(LESAM, "self.received[clients] = clients.w", "pass")],
    ),
    Fault(
        "FedLESAM, last: it is the model after the step",
        [(LESAM, "self.previous = server.given", "self.previous = server.given + server.update")],
    ),
    Fault(
        "a blind perturbation costs two gradients",
        [(STEP, "self.perturb is not None and not self.blind", "self.perturb is not None")],
    ),
    Fault(
        "a blind perturbation is not seen by the gradient",
        [
            (
                STEP,
                "None, self.model.x)\n            with self.model.shifted(e):\n",
                "None, self.model.x)\n            if e is not None:\n",
            )
        ],
    ),
    Fault(
        "FedSpeed: the gradients are mixed the other way round",
        [
            (
                SPEED,
                "gradient.mul_(self.alpha).add_(self.first[clients], alpha=1 - self.alpha)",
                "gradient.mul_(1 - self.alpha).add_(self.first[clients], alpha=self.alpha)",
            )
        ],
    ),
    Fault(
        "FedSpeed as printed: the dual's sign",
        [(SPEED, "update - self.dual[clients] / self", "update + self.dual[clients] / self")],
    ),
    Fault(
        "FedSpeed: the server's dual is over participants",
        [
            (
                SPEED,
                "self.penalty / server.num_clients * self.moved",
                "self.penalty / server.n * self.moved",
            )
        ],
    ),
    Fault("FedExP: the half is left out", [(EXP, "spread / (2 * (", "spread / (1 * (")]),
    Fault("FedExP: it may go less far than the mean", [(EXP, ".clamp(min=1)", "")]),
    Fault(
        "FedExP: after round 0 the mean with w^0 is evaluated",
        [(EXP, "server.w if server.round == 0 else (server", "(server")],
    ),
    Fault(
        "Scaffnew: the present rate in place of that of the round that is over",
        [(SKIPS, "self.probability / self.rate, 0.0)", "self.probability / clients.lr, 0.0)")],
    ),
    Fault("Scaffnew: the sign of h_i", [(SKIPS, "gradient.sub_(", "gradient.add_(")]),
    Fault("Scaffnew: one draw for all rounds", [(SKIPS, '"scaffnew", t)', '"scaffnew")')]),
    Fault(
        "random epochs: the upper end is left out (FedNova's code)",
        [("callbacks/drift/random_epochs.py", "self.high + 1)", "max(self.high, self.low + 1))")],
    ),
    Fault(
        "K_i by a method: it is that of round 0",
        [("fl_lightning/module.py", "self.cohort.steps(i, t)", "self.cohort.steps(i)")],
    ),
    Fault(
        "IFCA: the centre of the largest loss",
        [(CLUSTERS, ".argmin(dim=1)", ".argmax(dim=1)")],
    ),
    Fault(
        "IFCA: a centre moves by the share of all participants (option I)",
        [(CLUSTERS, "self.moved.weighted() / share[:, None]", "self.moved.weighted()")],
    ),
    Fault(
        "IFCA: who never took part has w",
        [("fl_lightning/callback.py", 'self.has("personal") and not kept', "False")],
    ),
    Fault(
        "broadcast: clients get w",
        [
            (
                LOOP,
                "self.train(transaction.for_clients, transaction)",
                "self.train(round, transaction)",
            )
        ],
    ),
    Fault(
        "broadcast: an update is measured from w",
        [
            (
                "fl_lightning/aggregation/update_accumulator.py",
                "        given = group.round.w\n",
                "        given = round.w\n",
            )
        ],
    ),
    Fault(
        "a method's state that it returned from aggregate is changed by others",
        [
            (
                "fl_lightning/aggregation/server_update.py",
                "update.to(round.w.dtype, copy=True)",
                "update.to(round.w.dtype)",
            )
        ],
    ),
    Fault(
        "FedAsync: a client compresses its distance from a model that it does not know",
        [
            (
                "fl_lightning/aggregation/update_accumulator.py",
                "group.x - (given if base is None or transmits else base)",
                "group.x - (given if base is None else base)",
            ),
            (
                "fl_lightning/aggregation/update_accumulator.py",
                "if transmits and base is not None:",
                "if False:",
            ),
        ],
    ),
    Fault(
        "IFCA: others read a w that means nothing",
        [("fl_lightning/round/clients.py", "if models and self", "if False and self")],
    ),
    Fault(
        "broadcast: what is said of it is not counted",
        [(TRAFFIC, "if transaction.sent is not None:", "if False:")],
    ),
    Fault(
        "evaluated: what the hook gives is not what is evaluated",
        [
            (
                LOOP,
                "vector = vector.detach().to(server.w).clone()",
                "vector = server.w.detach().clone()",
            )
        ],
    ),
    Fault(
        "states of k rows: what is not averaged moves",
        [
            (
                "fl_lightning/round/declared_state.py",
                "value.shape[-1:] != averaged.shape",
                "value.shape != averaged.shape",
            )
        ],
    ),
    Fault(
        "a sent state that is changed in place is not counted in its first round",
        [(TRAFFIC, "transaction.written_server(key)", "transaction.round.server_states.get(key)")],
    ),
    Fault(
        "draws of a method do not depend on the seed",
        [
            (
                "fl_lightning/callback.py",
                "sampling.generator(self._run.seed, purpose",
                "sampling.generator(0, purpose",
            )
        ],
    ),
]
