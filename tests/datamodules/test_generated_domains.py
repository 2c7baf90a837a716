"""Domains made by a rule, written once more from the rule."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fl_lightning import UserError
from fl_lightning.datamodules import GeneratedDomains
from fl_lightning.evaluation.domains import by_domain, over_domains, rows_of_domains
from fl_lightning.sampling import generator


def test_samples_follow_the_rule_whatever_the_seed() -> None:
    data = GeneratedDomains(3, 4, 20, 10, size=2, noise=0.3, shift=0.7, data_seed=5, seed=1)
    assert data.num_clients == 3 and list(data.client_names) == ["domain 0", "domain 1", "domain 2"]
    assert list(data.client_domains) == list(data.client_names) and data.num_classes == 4
    p = generator(5, "prototypes").standard_normal((4, 3, 2, 2))
    a = np.exp(0.7 * generator(5, "gain", 2).standard_normal(3))
    b = 0.7 * generator(5, "offset", 2).standard_normal(3)
    for side, indices in ((0, data.client_indices(2)), (1, data.client_test_indices(2) - 60)):
        n = (20, 10)[side]
        r = generator(5, "domain samples", 2, side)
        y = r.integers(0, 4, n)
        z = r.standard_normal((n, 3, 2, 2))
        samples = data.test_set if side else data.train_set
        assert samples is not None and samples.labels is not None
        assert samples.labels[indices].tolist() == y.tolist()
        for i, place in enumerate(indices):
            for c in range(3):
                x = a[c] * (p[y[i], c] + 0.3 * z[i, c]) + b[c]
                found = samples.x[int(place), c]  # type: ignore[attr-defined]
                assert torch.equal(found, torch.from_numpy(x.astype(np.float32)))
    other = GeneratedDomains(3, 4, 20, 10, size=2, noise=0.3, shift=0.7, data_seed=5, seed=9)
    assert other.partition_hash == data.partition_hash


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(UserError, match="domains=0"):
        GeneratedDomains(domains=0)


def test_tables_of_domains() -> None:
    domains = ["a", "b", "a", "c"]
    samples = {0: 1, 1: 4, 2: 3, 3: 0}
    table = {"acc": {0: 1.0, 1: 0.25, 2: 0.0}, "loss": {0: 2.0, 1: float("nan"), 2: 4.0}}
    assert by_domain(table["acc"], samples, domains) == {"a": 0.25, "b": 0.25}
    assert over_domains({"a": 1.0, "b": 3.0}, greater=False) == {"_mean": 2.0, "_worst": 3.0}
    greater = {"acc": True, "loss": False}
    lines = rows_of_domains(table, samples, domains, greater)
    assert lines == [
        ["domain", "clients", "samples", "acc", "loss"],
        ["a", "2", "4", "0.25", "3.5"],
        ["b", "1", "4", "0.25", ""],
        ["c", "1", "0", "", ""],
        ["mean", "4", "8", "0.25", "3.5"],
        ["worst", "4", "8", "0.25", "3.5"],
    ]
