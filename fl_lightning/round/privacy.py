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

import torch

from fl_lightning.errors import UserError, optional
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


def check_planned(name: str, sigma: float | None, rounds: int) -> None:
    """Refuse to find σ for a target if the number of rounds is not known (-1)."""
    if sigma is None and rounds < 0:
        raise UserError(
            f"{name}'s target_epsilon without noise_multiplier needs max_epochs, to divide it "
            "among the rounds."
        )


def check_spent(
    name: str, spent: float, target: float | None, t: int, of: str = "", also: str = ""
) -> None:
    """Refuse round ``t`` if ε after it, ``of`` a client, is above the target.

    Args:
        also: what helps, besides more noise and a larger target.
    """
    if target is not None and spent > target:
        raise UserError(
            f"{name}: round {t} would bring ε{of} to {spent:.4g}, above target_epsilon={target:g}. "
            f"Give more noise, {also}, or a larger target."
        )


def spend_round(method: Any, server: Any, settings: list[float], source: Any, others: str) -> None:
    """Note a round in the method's states ``spent_at`` and ``private_rounds``.

    ε is composed of equal rounds, so a round with other settings than the rounds before is refused.

    Args:
        settings: σ, and what else ε depends on; ``others``: the same in words.
        source: the seed of the noise, which is then known; else it is the run's secret.
    """
    seeded = isinstance(source, int)
    private = seeded or not settings[0] or int(method.private_rounds) == server.round
    if server.round and not (private and method.spent_at.tolist() == settings):
        raise UserError(
            f"{type(method).__name__}: some rounds before round {server.round} had no privacy, "
            f"{others}, or noise that a known seed gives, and ε would not hold for them. Go on "
            "with the settings that the run began with, or begin another run with init_from."
        )
    method.spent_at = torch.tensor(settings, dtype=torch.float64)
    method.private_rounds += 0 if seeded else 1


@lru_cache
def _one_round(sigma: float, share: float) -> Any:
    """Return the privacy loss distribution of one round."""
    distribution = optional("dp_accounting.pld.privacy_loss_distribution", "privacy", "ε")
    # With little noise, privacy losses are about 1/σ², and memory grows with their number. So the
    # grid is coarser then and rounds up, so that ε is never too small.
    interval = 1e-4 * max(1.0, (0.3 / sigma) ** 2)
    return distribution.from_gaussian_mechanism(
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
