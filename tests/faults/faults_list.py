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


def _equal(file: str, line: str, reason: str, *mutations: str) -> dict[tuple[str, str, str], str]:
    return {(f"callbacks/{file}.py", line, mutation): reason for mutation in mutations}


WORK = "return (k - rho * (1 - rho**k) / (1 - rho)) / (1 - rho)"
QUOTIENT = "(k - rho * (1 - rho ** k) / (1 - rho)) / (1 - rho)"
SURVIVORS = {
    **_equal(
        "consensus_distance_logger",
        "moved = (clients.x - clients.w).double()",
        "equivalent: the spread around the mean does not depend on where the origin is",
        "sign: clients.x - clients.w (column 9)",
        "left operand alone: clients.x - clients.w (column 9)",
        "factor: twice the right of clients.x - clients.w (column 9)",
    ),
    **_equal(
        "global_sharpness_aware_minimization",
        "self.dual[clients] = self.mu_i[clients] - self.last[clients]",
        "equivalent: U is brought to length r, so its scale does not matter",
        "factor: self.dual[clients] = self.mu_i[clients] - self.last[clients] (column 0)",
    ),
    **_equal(
        "global_sharpness_aware_minimization",
        "mean = self.dual.mean()",
        "equivalent: U is brought to length r, so its scale does not matter",
        "sum instead: self.dual.mean() (column 7)",
    ),
    **_equal(
        "normalized_averaging",
        WORK,
        "equivalent: a factor that all τ_i share cancels in (Σ p τ) Σ p u/τ",
        f"sign: {QUOTIENT} (column 7)",
        f"left operand alone: {QUOTIENT} (column 7)",
        "sign: 1 - rho (column 47)",
        "left operand alone: 1 - rho (column 47)",
        "factor: twice the right of 1 - rho (column 47)",
    ),
    **_equal(
        "partial_averaging",
        "mask[layout[name][0]] = True",
        "equivalent: 2 is True in a mask",
        "factor: mask[layout[name][0]] = True (column 0)",
    ),
}
"""(file, right line, mutation) -> why no test can, or need, tell it from the right one."""
