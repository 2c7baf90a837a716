"""The contracts: they hold for every callback of ours, and each goes red for a method that breaks
it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fl_lightning import ClientState, Exponential, FederatedCallback, Steps, Upload
from fl_lightning import callbacks as c
from fl_lightning.callback import CLASS_LABELS, Clients, Server
from fl_lightning.callbacks.loggers import divergence_logger
from fl_lightning.lab.contracts import small_runs
from fl_lightning.lab.contracts.check_report import Check, Failed
from fl_lightning.lab.contracts.federation import (
    Outcome,
    fit,
    in_processes,
    outcome,
    quiet,
    require_same,
)
from fl_lightning.testing import INVARIANTS, _checked, check_method
from tests.helpers.wrong_methods import WRONG, AttributeInHook, Nothing, RowNorms

OTHERS: dict[str, Callable[..., FederatedCallback]] = {
    "FedInit, mean": lambda **given: c.RelaxedInitialization(**{"offset": "mean", **given}),
    "SCAFFOLD, gradient": lambda: c.ControlVariates("gradient"),
    "FedLADA's moments": lambda: c.AdamDirection(second="averaged", share="full"),
    "FedMuon": lambda: c.MuonDirection(start="averaged"),
    "FedMuon-LMO": lambda: c.MuonDirection(
        nesterov=False, start="own", variates=True, average="all", vectors="unit"
    ),
    "PrototypePull": lambda **given: c.PrototypePull(**{"classes": 3, "features": 4, **given}),
    "RobustAggregation": lambda: c.RobustAggregation("bulyan", byzantine=0),
    "DP, adaptive": lambda: c.DifferentialPrivacy(
        0.5, noise_multiplier=4.0, target_quantile=0.5, count_stddev=5.0
    ),
    "FedALS": lambda **given: c.PartialAveraging(
        **(given or {"periods": {"first.*": 2, "head.bias": "never"}})
    ),
    "FedLESAM, last": lambda **given: c.LocallyEstimatedPerturbation(**{"source": "last", **given}),
    "FedCM, scheduled": lambda **given: c.ClientMomentum(**{"alpha": Exponential(0.5), **given}),
    "DifferentialPrivacy": lambda **given: c.DifferentialPrivacy(
        # With little noise each ε takes seconds, and what the contracts compare is not its size.
        **{"clip": 0.5, "noise_multiplier": 4.0, **given}
    ),
    "RecordPrivacy": lambda **given: c.RecordPrivacy(
        **{"clip": 0.5, "noise_multiplier": 4.0, **given}
    ),
    "RandomK": lambda **given: c.RandomK(**{"fraction": 0.4, "memory": True, **given}),
    "ErrorFeedback21": lambda: c.ErrorFeedback21(c.RandomK(0.4, memory=True), "all"),
    "TopKCompression": lambda **given: c.TopKCompression(**{"fraction": 0.4, **given}),
    # of its 100 probes each would take two products in each of forty runs
    "HessianLogger": lambda **given: c.HessianLogger(**{"probes": 3, **given}),
}
# These need a language model and a file of records: see
# tests/evaluation/test_language_loggers.py.
ELSEWHERE = ("ExactMatch", "MultipleChoice")
OURS: dict[str, Callable[..., FederatedCallback]] = {
    **{
        name: made
        for name, made in vars(c).items()
        if name in c.__all__ and isinstance(made, type) and issubclass(made, FederatedCallback)
        if name not in ELSEWHERE
    },
    **OTHERS,
}


@pytest.mark.parametrize("name", OURS)
def test_our_methods_keep_the_contracts(name: str) -> None:
    report = check_method(OURS[name])
    assert report.ok, str(report)


def test_scaffold_keeps_its_estimates_in_a_round_without_learning() -> None:
    """Where Σ η K = 0 nothing was estimated: c_i stays, and c."""
    with quiet():
        before, after = (
            outcome(fit([c.ControlVariates()], rounds=n, lr_decay=Steps({1: 0.0}))) for n in (1, 2)
        )
    kept = {k: v for k, v in after.items() if "ControlVariates.c" in k}
    require_same(
        {k: before.get(k, torch.zeros_like(v)) for k, v in kept.items()}, kept, 0.0, "lr 0", ""
    )
    assert len(kept) > 4


@pytest.mark.parametrize(
    ("beta", "rule", "participation", "warned"),
    [
        (0.5, "models", 2, True),
        (0.49, "models", 2, False),
        (0.5, "updates", 2, False),
        (0.5, "models", "all", False),
    ],
)
def test_fedinit_warns_where_it_amplifies_a_drift(
    beta: float, rule: Any, participation: Any, warned: bool
) -> None:
    """beta >= n/(m - n), which is 1/2 with 2 of 6 clients."""
    with quiet():
        module = fit([c.RelaxedInitialization(beta, rule)], rounds=1, participation=participation)
    assert any("amplifies" in note for note in module.notes) == warned


def test_divergence_of_all_clients_is_logged_unless_it_is_turned_off() -> None:
    with quiet():
        logged = [
            outcome(fit([c.DivergenceLogger(given)], rounds=1)) for given in (None, True, False)
        ]
    assert ["log divergence/all" in left for left in logged] == [True, True, False]


@pytest.mark.parametrize("limit", ["MOST_CLIENTS", "MOST_PARAMETERS"])
def test_models_of_many_clients_or_large_ones_are_kept_only_where_asked(
    limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(divergence_logger, limit, 5)  # there are six clients, and 31 parameters
    with quiet():
        runs = [fit([c.DivergenceLogger(given)], rounds=1) for given in (None, True)]
    assert ["log divergence/all" in outcome(run) for run in runs] == [False, True]
    assert [bool(run.client_rows.names()) for run in runs] == [False, True]
    assert all("log divergence/participants" in outcome(run) for run in runs)


def verdict(cls: type[FederatedCallback], invariant: str) -> Check:
    with quiet():
        return _checked(invariant, INVARIANTS[invariant], small_runs.Method(cls))


@pytest.mark.parametrize(
    ("cls", "invariant", "says"), WRONG, ids=[f"{w[0].__name__}: {w[1]}" for w in WRONG]
)
def test_a_wrong_method_fails_with_a_message_that_leads_to_the_fault(
    cls: type[FederatedCallback], invariant: str, says: str
) -> None:
    check = verdict(cls, invariant)
    assert check.verdict == "fails"
    assert says in f"{check.reason} {check.hint}"


def test_every_contract_is_seen_to_fail() -> None:
    assert {invariant for _, invariant, _ in WRONG} == set(INVARIANTS)


def test_the_report_is_a_table_with_reasons_and_hints() -> None:
    bad = check_method(AttributeInHook)
    assert not bad.ok
    assert "what: on_local_end set or changed self.latest" in str(bad) and "hint: " in str(bad)


def test_what_methods_print_in_each_of_many_runs_is_not_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Prints(FederatedCallback):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            trainer.print("spent so far")
            raise RuntimeError("no more")

    assert not check_method(Prints).ok
    assert "spent" not in capsys.readouterr().out


def test_an_error_in_every_run_is_the_whole_report() -> None:
    report = check_method(Nothing)
    assert not report.ok and {check.verdict for check in report.checks[1:]} == {"n/a"}
    first, _, *rest = str(report).splitlines()
    assert first == "Nothing: nothing was checked, because a run of three rounds fails"
    assert "has no attribute 'nothing'" in " ".join(rest) and len(rest) < 4


def test_an_error_of_groups_is_explained_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = check_method(RowNorms)["engines agree"]
    assert found.reason.startswith("engine='stacked': RuntimeError: The size of tensor")
    assert "wrong_methods.py, line" in found.reason and "clients.norm(v)" in found.hint
    assert not caplog.records


def test_of_two_processes_one_that_fails_ends_the_other() -> None:
    def job() -> Outcome:
        if os.environ["RANK"] == "0":
            raise OSError("address already in use")
        time.sleep(1000)
        return {}

    with pytest.raises(Failed, match="OSError: address already in use"):
        in_processes(2, job)


class Evaluating(FederatedCallback):
    """Reads the accuracy on a client's training samples and the loss on its test samples."""

    neutral = None
    loss = Upload(shape=())

    def on_local_end(self, clients: Clients) -> None:
        on_train = clients.evaluate(clients.x, "train")
        clients.log("own/acc", on_train["acc"])
        self.loss[clients] = clients.evaluate(clients.x, "test")["loss"][:, 0]

    def on_server_update(self, server: Server) -> None:
        server.log("own/loss", self.loss.mean())


def test_a_method_that_evaluates_keeps_the_contracts() -> None:
    found = check_method(Evaluating)
    assert found.ok, str(found)


def test_a_method_that_reads_label_counts_in_hooks_is_rehearsed() -> None:
    class Counts(FederatedCallback):
        notes = (CLASS_LABELS,)
        kept = ClientState(shape=(3,), synchronised=False)

        def on_local_end(self, clients: Any) -> None:
            self.kept[clients] = clients.label_counts / clients.sizes

    assert str(check_method(Counts)).startswith("Counts: all contracts hold")
