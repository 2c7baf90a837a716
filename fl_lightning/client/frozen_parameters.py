"""Frozen parameters that local steps begin to write later than in the trials before round 0."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fl_lightning.errors import UserError
from fl_lightning.learner.layout import same_bits
from fl_lightning.learner.modules import keeps_frozen

SAMPLES = 16  # numbers of each parameter, so that a large base costs little


class FrozenParameters:
    """A few numbers of each frozen parameter of a copy of the learner, before local steps.

    Parameters that count as buffers are left out, as is a learner with ``frozen_stay``.
    """

    def __init__(self, copy: Any) -> None:
        self.copy = copy
        self.before = self._now()

    def check(self, t: int) -> None:
        """Refuse a learner whose steps changed one of them in round ``t``.

        Raises:
            UserError: it names the parameter.
        """
        now = self._now()
        for name, (parameter, numbers) in self.before.items():
            # A step may also replace a parameter, such as a teacher that it copies anew.
            same, numbers_now = now.get(name, (None, numbers))
            if same is parameter and not same_bits(numbers_now, numbers):
                raise UserError(
                    f"learner {type(self.copy.learner).__name__}: its steps change the frozen "
                    f"parameter {name} in round {t}, but they did not in the trial steps before "
                    "round 0. So it does not count as a buffer, and one client would go on with "
                    "another client's value. Let the steps write it from the first step on, for "
                    "example as a copy of the student until its average begins, or register it as "
                    "a buffer (register_buffer)."
                )

    def _now(self) -> dict[str, tuple[nn.Parameter, Tensor]]:
        learner = self.copy.learner
        if keeps_frozen(learner):
            return {}
        # A step may freeze a trainable parameter for a while.
        others = {*self.copy.layout, *self.copy.as_buffers}
        return {
            name: (parameter, sampled(parameter.data))
            for name, parameter in learner.named_parameters()
            if not parameter.requires_grad and name not in others
        }


def sampled(data: Tensor) -> Tensor:
    """Return a copy of some of a tensor's numbers, ``(k,)``."""
    flat = data.reshape(-1)
    return flat[:: max(1, len(flat) // SAMPLES)][:SAMPLES].clone()
