"""Scores of a curve and its targets, against sums written out by hand; intervals and corrections,
against SciPy's own test and the definition."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import make_run
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fl_lightning.lab.report.intervals import holm, paired
from fl_lightning.lab.report.runs import ReportedRun, read_run
from fl_lightning.lab.report.scores import reached, scores, smooth, tail

short = st.lists(st.floats(0, 1), min_size=1, max_size=30)
# up to where the window is at its widest; some fall, so that their maximum lies before the last 50
long = st.builds(
    lambda length, seed, slope: (
        0.5 + slope * np.linspace(-1, 1, length) + drawn(seed, length)
    ).tolist(),
    st.integers(30, 700),
    st.integers(0, 1000),
    st.sampled_from([-0.3, 0.0, 0.3]),
)
curves = short | long


def drawn(seed: int, length: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.random.default_rng(seed).uniform(-0.2, 0.2, length)


def smoothed_by_hand(values: list[float]) -> list[float]:
    """Weights of a Hann window around each value, those that lie outside left out."""
    width = min(101, len(values) // 5)
    width -= width % 2 == 0
    if width < 3:
        return values
    half = width // 2
    # none of them is 0
    weights = [0.5 - 0.5 * math.cos(2 * math.pi * (k + 1) / (width + 1)) for k in range(width)]
    smoothed = []
    for t in range(len(values)):
        inside = [
            (weights[k + half], values[t + k])
            for k in range(-half, half + 1)
            if 0 <= t + k < len(values)
        ]
        smoothed.append(math.fsum(w * v for w, v in inside) / math.fsum(w for w, _ in inside))
    return smoothed


def run_of(values: list[float], status: str = "done", metric: str = "val/acc") -> ReportedRun:
    rounds = np.arange(len(values), dtype=float)
    columns = {
        "round": rounds,
        metric: np.array(values),
        "communication/total_bytes": 7.0 * (rounds + 1),
        "time/round": np.full(len(values), 0.5),
    }
    return ReportedRun(Path("x"), status, 0, "arm", {}, columns)


@given(curves)
def test_every_score_is_the_sum_written_out(values: list[float]) -> None:
    found = scores(np.array(values))
    assert found["last"] == values[-1] and found["max"] == max(values)
    assert found["last10"] == pytest.approx(math.fsum(values[-10:]) / len(values[-10:]), abs=1e-12)
    assert found["smoothed"] == pytest.approx(max(smoothed_by_hand(values)[-50:]), abs=1e-12)


@given(curves, st.floats(0, 1))
def test_a_target_is_reached_when_the_smoothed_curve_first_is_there(
    values: list[float], target: float
) -> None:
    for metric, there in (("val/acc", lambda v: v >= target), ("val/loss", lambda v: v <= target)):
        curve = [float(v) for v in smooth(np.array(values))]
        wanted = next((t + 1 for t, value in enumerate(curve) if there(value)), None)
        found = reached(run_of(values, metric=metric), metric, target)
        assert found["rounds"] == wanted
        assert found["bytes"] == (None if wanted is None else 7 * wanted)
        assert found["seconds"] == (None if wanted is None else 0.5 * wanted)


@pytest.mark.parametrize("status", ["diverged", "running", "stopped", "failed"])
def test_only_a_run_that_is_done_reaches_a_target(status: str) -> None:
    expected = dict.fromkeys(("rounds", "bytes", "gradients", "seconds"))
    assert reached(run_of([0.9] * 5, status), "val/acc", 0.5) == expected


def test_what_was_not_measured_is_left_out_and_rounds_stay_rounds(tmp_path: Path) -> None:
    columns = {
        "val/acc": [None, 0.1, None, math.inf, None, 0.6, None, 0.8],
        "communication/total_bytes": [10, 20, 30, 40, 50, 60, 70, None],
        "time/round": [1.0] * 7 + [None],
    }
    run = read_run(make_run(tmp_path / "x", "a", 0, columns))
    known = {"bytes": 60, "gradients": None, "seconds": 6.0}
    assert reached(run, "val/acc", 0.6) == {"rounds": 6, **known}
    # What is not known is not said.
    assert reached(run, "val/acc", 0.7) == {"rounds": 8, **dict.fromkeys(known)}
    expected = {"last10": 0.5, "smoothed": 0.8, "last": 0.8, "max": 0.8}
    assert scores(run.column("val/acc")[[1, 5, 7]]) == expected


def test_no_value_no_score() -> None:
    assert set(scores(np.empty(0)).values()) == {None} and tail(run_of([]), "val/acc") is None


def test_the_last_line_counts_without_a_line_break_where_the_run_ended(tmp_path: Path) -> None:
    for status, length in (("done", 3), ("diverged", 3), ("running", 2)):
        folder = make_run(tmp_path / status, "a", 0, {"val/acc": [0.1, 0.2, 0.34]}, status)
        text = (folder / "metrics.csv").read_text()
        (folder / "metrics.csv").write_text(text.rstrip("\n"))
        # 0.34 may be cut from 0.341 while it runs
        assert len(read_run(folder).column("val/acc")) == length


# ----------------------------------------------------------------------------------- intervals


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12).filter(lambda d: np.std(d) > 1e-6))
def test_a_paired_interval_is_the_t_test_of_the_differences(differences: list[float]) -> None:
    found, wanted = paired(differences), stats.ttest_1samp(differences, 0.0)
    low, high = wanted.confidence_interval(0.95)
    expected = (len(differences), pytest.approx(np.mean(differences), abs=1e-12))
    assert (found.n, found.mean) == expected
    assert found.sd == pytest.approx(np.std(differences, ddof=1), rel=1e-9)
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-9), pytest.approx(high, abs=1e-9))
    assert found.p == pytest.approx(wanted.pvalue, abs=1e-9)


def test_too_few_and_all_equal_differences() -> None:
    assert vars(paired([])) == dict.fromkeys(("mean", "sd", "low", "high", "p")) | {"n": 0}
    one = dict.fromkeys(("sd", "low", "high", "p")) | {"n": 1, "mean": 0.3}
    assert vars(paired([0.3])) == one
    equal, nothing = paired([0.1, 0.1, 0.1]), paired([0.0, 0.0])
    assert (equal.mean, equal.low, equal.high) == pytest.approx((0.1, 0.1, 0.1), abs=1e-12)
    assert (equal.sd, equal.p) == (0.0, 0.0)
    assert (nothing.mean, nothing.sd, nothing.p) == (0.0, 0.0, 1.0)


p_values = st.lists(st.none() | st.floats(0, 1), max_size=8)


@given(p_values)
def test_holm_by_its_definition(p: list[float | None]) -> None:
    known = [x for x in p if x is not None]
    for value, corrected in zip(p, holm(p), strict=True):
        if value is None:
            assert corrected is None
            continue
        below = [(sum(y >= x for y in known), x) for x in known if x <= value]
        assert corrected == pytest.approx(min(1.0, max(count * x for count, x in below)), abs=1e-12)
