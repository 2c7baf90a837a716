"""Intervals and corrections, against SciPy's own test and the definition."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fl_lightning.lab.report.intervals import holm, paired


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=12).filter(lambda d: np.std(d) > 1e-6))
def test_a_paired_interval_is_the_t_test_of_the_differences(differences: list[float]) -> None:
    found, wanted = paired(differences), stats.ttest_1samp(differences, 0.0)
    low, high = wanted.confidence_interval(0.95)
    assert (found.n, found.mean) == (
        len(differences),
        pytest.approx(np.mean(differences), abs=1e-12),
    )
    assert found.sd == pytest.approx(np.std(differences, ddof=1), rel=1e-9)
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-9), pytest.approx(high, abs=1e-9))
    assert found.p == pytest.approx(wanted.pvalue, abs=1e-9)


def test_too_few_and_all_equal_differences() -> None:
    none, one = paired([]), paired([0.3])
    assert (none.n, none.mean, none.sd, none.low, none.high, none.p) == (
        0,
        None,
        None,
        None,
        None,
        None,
    )
    assert (one.n, one.mean, one.sd, one.low, one.high, one.p) == (1, 0.3, None, None, None, None)
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
