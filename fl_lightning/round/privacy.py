"""For private methods: ε of their rounds, the σ for a target, and buffers that would leak.

ε comes from the privacy loss distribution of the Poisson-subsampled Gaussian mechanism, by
dp-accounting. Neighbours differ by one client or one sample, added or removed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import PositiveFloat, check


def check_given(
    name: str, clip: float, sigma: float | None, target: float | None, clips: bool
) -> None:
    """Refuse a method without σ and target, and an infinite C.

    Args:
        name: the method's class, for the error.
        clips: whether it needs a finite C; without noise it may clip nothing.

    Raises:
        UserError: neither is given, or C is not accepted.
    """
    if clips:
        check(f"{name}: clip", clip, PositiveFloat)
    if sigma is None and target is None:
        raise UserError(
            f"{name} needs noise_multiplier or target_epsilon: give one of the two, or both."
        )


@lru_cache
def _one_round(sigma: float, share: float) -> Any:
    """Return the privacy loss distribution of one round."""
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError:
        raise UserError(
            "privacy: ε needs the package dp-accounting: pip install 'fl-lightning[privacy]'."
        ) from None
    # With little noise, privacy losses are about 1/σ², and memory grows with their number. So the
    # grid is coarser then and rounds up, so that ε is never too small.
    interval = 1e-4 * max(1.0, (0.3 / sigma) ** 2)
    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=share, value_discretization_interval=interval
    )


@lru_cache(1024)
def epsilon(sigma: float, share: float, rounds: int, delta: float) -> float:
    """Return ε(δ) after so many rounds, or steps, with noise multiplier σ, if each client, or
    sample, takes part in each with this probability.

    The returned ε is infinite if σ is below 0.001, because one such round already has more than
    10⁵, and its distribution would not fit into memory.
    """
    if rounds == 0:
        return 0.0
    if sigma < 1e-3:
        return math.inf
    return float(_one_round(sigma, share).self_compose(rounds).get_epsilon_for_delta(delta))


def calibrated(target: float, share: float, rounds: int, delta: float) -> float:
    """Return the least σ, to 1 part in 10⁴, whose ε(δ) after these rounds is within the target."""
    high = 1.0
    while epsilon(high, share, rounds, delta) > target:
        high = 2 * high
    low = 0.0 if high == 1.0 else high / 2
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        if epsilon(middle, share, rounds, delta) <= target:
            high = middle
        else:
            low = middle
    return high


def refuse_sent_buffers(method: str, module: Any) -> None:
    """Refuse buffers that clients would send or keep.

    Raises:
        UserError: it names ``method`` and the buffer.
    """
    policy = module.settings.buffers
    words: Mapping[str, str] = {"*": policy} if isinstance(policy, str) else policy
    for name in module.global_model.buffers():
        fitting = [word for pattern, word in words.items() if fnmatchcase(name, pattern)]
        # Integers are refused too: a count of samples reveals something about a client.
        if not fitting or fitting[0] != "keep":
            raise UserError(
                f"{method}: clients would send the buffer {name} neither clipped nor noised. Use "
                "buffers='keep', or a network without buffers (GroupNorm in place of BatchNorm)."
            )
