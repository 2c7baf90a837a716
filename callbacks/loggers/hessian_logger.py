"""How sharp the loss is at the global model: the largest eigenvalue and the trace of the Hessian.

Y. Sun, L. Shen, S. Chen, L. Ding, D. Tao: Dynamic Regularized Sharpness Aware Minimization in
Federated Learning (ICML 2023), arXiv:2305.11584, Table 2.
"""

from __future__ import annotations

from typing import Annotated, Any

from fl_lightning.evaluation import curvature
from fl_lightning.evaluation.evaluator import Evaluator, drawn
from fl_lightning.evaluation.measurement import Measurement
from fl_lightning.introspection.accepted import AtLeast, PositiveFloat, PositiveInt

NAMES = ("top_eigenvalue", "top_residual", "trace", "trace_stderr", "norm")


class HessianLogger(Measurement):
    """Logs ``hessian/top_eigenvalue``, ``top_residual``, ``trace``, ``trace_stderr`` and ``norm``.

    H is the Hessian of the mean loss at the evaluated model. The mean is over a fixed random subset
    of the clients' training samples, each counted as often as clients hold it. The loss is that of
    ``training_step`` in evaluation mode, with biases, without augmentation and weight decay.

    - top_eigenvalue: the largest eigenvalue (not in absolute value), by Lanczos' method;
      top_residual: its residual, the norm of Hv - λv over that of λ.
    - trace: by Hutchinson's method, but exact along directions in which H is large; trace_stderr:
      its standard error.
    - norm: ‖w‖ of the evaluated model. A dual variable changes the norm and the curvature together,
      so compare both, and also ``global/train_loss``.

    The measurement comes after the round, on a copy of the learner in full precision: it changes no
    bit of the training. A product with H costs about three gradients of the subset; there are about
    twice ``probes`` of them.
    Sent and kept: nothing.

    Args:
        every_n_rounds: k: measure if (t + 1) mod k = 0, and after the last round; None: only after
            the last.
        samples: size of the subset, which is drawn once from the run's seed.
        tolerance: relative tolerance of the eigenvalue.
        probes: number of vectors of ±1 for the trace, at least 2; the same vectors each time.

    Example:
        >>> from fl_lightning.callbacks import HessianLogger
        >>> from fl_lightning.testing import tiny_run
        >>> logged = tiny_run(HessianLogger()).trainer.callback_metrics
        >>> bool(logged["hessian/top_residual"] <= 1e-3)
        True
    """

    not_over_sites = "the clients' samples"

    prefixes = ("hessian/",)

    def __init__(
        self,
        every_n_rounds: int | None = 10,
        samples: PositiveInt = 2000,
        tolerance: PositiveFloat = 1e-3,
        probes: Annotated[int, AtLeast(2)] = 100,
    ) -> None:
        super().__init__(every_n_rounds)
        # A standard error needs at least two probes.
        self.samples = int(samples)
        self.tolerance = float(tolerance)
        self.probes = int(probes)

    def measure(self, module: Any) -> dict[str, float]:
        subset = drawn(module.trainer.datamodule, self.samples, module.run_seed, "hessian")
        evaluator, w = Evaluator.of_evaluated(module.run, module.trainer, exact=True)
        hessian = curvature.Hessian(evaluator, w, subset)
        measured = curvature.measure(hessian, self.tolerance, self.probes, module.run_seed)
        return {f"hessian/{name}": getattr(measured, name) for name in NAMES}
