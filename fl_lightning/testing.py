"""For authors: ``check_method(factory)`` tests the contracts of a method, and ``tiny_run`` tries
it.

>>> from fl_lightning.callbacks import SharpnessAwareMinimization
>>> check_method(SharpnessAwareMinimization).ok
True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fl_lightning.callback import FederatedCallback
from fl_lightning.lab.contracts import rehearsal, small_runs
from fl_lightning.lab.contracts.check_report import (
    RUN,
    Check,
    CheckReport,
    Failed,
    NotApplicable,
    where,
)
from fl_lightning.lab.contracts.federation import ROUNDS, fit, quiet, unprinted
from fl_lightning.module import FederatedModule

__all__ = ["INVARIANTS", "Check", "CheckReport", "check_method", "tiny_run"]

# Every invariant by name; its function raises if the invariant does not hold.
INVARIANTS: dict[str, Callable[[small_runs.Method], None]] = {
    RUN: small_runs.plain,
    "uploads are assigned": small_runs.uploads,
    "draws have keys": rehearsal.draws,
    "neutral setting is FedAvg": small_runs.neutral,
    "order of clients": small_runs.order_of_clients,
    "order of training": small_runs.order_of_training,
    "engines agree": small_runs.engines,
    "two processes": small_runs.processes,
    "frozen parameters stay": small_runs.frozen,
    "resume is exact": small_runs.resume,
    "client hooks set nothing on self": rehearsal.untouched_self,
    "local steps can be captured": rehearsal.traceable,
    "small clients, short batches": small_runs.small_clients,
    "rounds with learning rate 0": small_runs.zero_rate,
    "finite at zero gradients": small_runs.zero_gradient,
    "unequal learning rates": small_runs.unequal_rates,
    "sparse and unused gradients": small_runs.lazy_gradients,
    "buffers untouched": small_runs.buffers,
    "another callback, either order": small_runs.beside_another,
}


def check_method(factory: Callable[..., FederatedCallback]) -> CheckReport:
    """Test every contract of a method, in some forty runs of three rounds of a tiny model.

    Args:
        factory: makes a new callback at each call: a class, or for example ``partial(OwnAnchor,
            mu=0.1)``. If it takes the class's ``neutral`` by keyword, it gets it.

    Returns:
        A report with ``.ok`` and ``.checks``; ``print(report)`` shows a table with reason and hint
        for each failure. If a plain run fails, nothing else is tried.

    >>> class Forgetful(FederatedCallback):
    ...     def on_local_end(self, clients):
    ...         self.last = clients.x
    >>> report = check_method(Forgetful)
    >>> report.ok, report["client hooks set nothing on self"].reason
    (False, 'on_local_end set or changed self.last')
    """
    with quiet(), unprinted():
        method = small_runs.Method(factory)
        checks: list[Check] = []
        for name, check in INVARIANTS.items():
            if checks and checks[0].verdict == "fails":
                # It would fail for the same reason, with a hint that does not help.
                checks.append(Check(name, "n/a", f"{RUN} fails"))
            else:
                checks.append(_checked(name, check, method))
        return CheckReport(method.cls.__name__, checks)


def tiny_run(
    *callbacks: FederatedCallback, rounds: int = ROUNDS, **arguments: Any
) -> FederatedModule:
    """Run methods and loggers on the contracts' tiny federation, always with the same bits.

    A call takes a tenth of a second. The federation has six clients of 1 to 12 samples, three of
    them per round, two local epochs of SGD at 0.2 × 0.9^t with weight decay 0.01, and a model of 31
    parameters.

    Args:
        callbacks: methods and loggers.
        arguments: arguments of :class:`~fl_lightning.module.FederatedModule`, instead of the values
            above.

    Returns:
        The trained module: ``global_vector`` is w, ``server_states[key]`` and
        ``client_rows.read(key, i)`` are the methods' states, and ``trainer.callback_metrics`` has
        the last logged values.

    >>> tiny_run(participation="all").global_vector.shape
    torch.Size([31])
    """
    with quiet():
        return fit(callbacks, rounds, whole=False, **arguments)


def _checked(
    name: str, check: Callable[[small_runs.Method], None], method: small_runs.Method
) -> Check:
    try:
        check(method)
    except Failed as failed:
        return Check(name, "fails", failed.reason, failed.hint)
    except NotApplicable as reason:
        return Check(name, "n/a", str(reason))
    except Exception as error:
        # The user's code may raise anything, and the report shows it.
        return Check(name, "fails", where(error))
    return Check(name, "holds")
