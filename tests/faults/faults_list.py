"""The faults to plant by hand, as replacements of text, and why some mutants cannot be caught."""

from __future__ import annotations

from dataclasses import dataclass

Edit = tuple[str, str, str]  # file, right text (once in it), wrong text


@dataclass(frozen=True)
class Fault:
    """A fault, where it is planted, and the callbacks whose tests should see it."""

    name: str
    edits: list[Edit]
    classes: list[str]


FAULTS = [
    Fault(
        "SCAFFOLD: c_i is never stored",
        [("callbacks/control_variates.py", "self.c_i[clients] += change", "pass")],
        ["ControlVariates"],
    ),
    Fault(
        "SCAFFOLD: the sign of c_i is flipped",
        [("callbacks/control_variates.py", "self.c - self.c_i[clients]\n", "self.c_i[clients] - self.c\n")],
        ["ControlVariates"],
    ),
    Fault(
        "SCAFFOLD: K is taken from the configuration, not counted",
        [("fl_lightning/rounds.py", "here = self.steps * ", "here = torch.full_like(self.steps, 5.0) * ")],
        ["ControlVariates"],
    ),
    Fault(
        "FedDyn: the dual is not anchored at w^t",
        [("callbacks/dynamic_regularization.py", "moved = clients.x - clients.w", "moved = clients.x - clients.start")],
        ["DynamicRegularization"],
    ),
    Fault(
        "FedProx: the norm is not squared",
        [
            (
                "callbacks/proximal_term.py",
                "self.mu * (clients.x - clients.w)",
                "self.mu * (clients.x - clients.w) / (1e-12 + clients.norm(clients.x - clients.w))",
            )
        ],
        ["ProximalTerm"],
    ),
    Fault(
        "SAM perturbs with weight decay",
        [
            (
                "callbacks/sharpness_aware_minimization.py",
                "        norm = clients.norm(gradient)\n",
                "        gradient = gradient + 0.01 * clients.x\n        norm = clients.norm(gradient)\n",
            )
        ],
        ["SharpnessAwareMinimization"],
    ),
    Fault(
        "FedALS: φ is never averaged (the paper's misprint)",
        [
            (
                "fl_lightning/parts.py",
                "return period is not None and (t + 1) % period == 0",
                "return period == 1",
            )
        ],
        ["PartialAveraging"],
    ),
    Fault(
        "server state is left out of the checkpoint",
        [
            (
                "fl_lightning/persistence.py",
                '"server": {k: v.clone() for k, v in module.server_states.items()}',
                '"server": {}',
            )
        ],
        ["ControlVariates", "ClientMomentum"],
    ),
    Fault(
        "client state is left out of the checkpoint",
        [("fl_lightning/persistence.py", '"clients": index', '"clients": {}')],
        ["ControlVariates", "RelaxedInitialization"],
    ),
    Fault(
        "buffers of the last client are kept",
        [
            ("fl_lightning/engines/sequential.py", "            self.replica.load_buffers(buffers)\n", ""),
            (
                "fl_lightning/server_step.py",
                "    for name, buffer in module.learner.named_buffers():\n        if",
                "    for name, buffer in ():\n        if",
            ),
        ],
        ["SharpnessAwareMinimization"],
    ),
]

SURVIVORS: dict[tuple[str, str, str], str] = {}
"""(file, right line, mutation) -> why no test can, or need, tell it from the right one."""
