"""Which way is better: one rule for reports, sweeps, clients and best.ckpt."""

from __future__ import annotations

import inspect
import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics

from fl_lightning import UserError
from fl_lightning.callbacks import PerClientEvaluation
from fl_lightning.lab.cli.run_folder import RunCheckpoint, RunFolderWriter
from fl_lightning.lab.cli.run_record import RunRecord
from fl_lightning.lab.report.claims import read_claims
from fl_lightning.lab.report.report_tables import scores
from fl_lightning.lab.report.runs import find
from fl_lightning.lab.report.summary import summarise
from fl_lightning.lab.sweep.grid import PlannedRun
from fl_lightning.lab.sweep.selection import Candidate, choose
from fl_lightning.lab.sweep.sweep_file import Selection
from fl_lightning.lab.sweep.sweep_folder import DIVERGED, DONE
from fl_lightning.metrics import Metrics, higher_is_better
from tests.callbacks.test_per_client_evaluation import data
from tests.helpers.learners import Lit, federated, trainer
from tests.report.folders import make_arm

KNOWN = {
    "val/acc": True,
    "val_accuracy": True,
    "val/f1": True,
    "val/auroc": True,
    "val_auc": True,
    "val/dice": True,
    "val/MulticlassF1Score": True,
    "val/psnr": True,
    "val/rougeL": True,
    "val/loss": False,
    "val_loss": False,
    "val/perplexity": False,
    "val/MeanSquaredError": False,
    "val/wer": False,
    "val.mae": False,
}
UNKNOWN = ["val/quality", "val/acc_top5", "F1Score_macro", "val/lossless", "val-accuracy.best"]
FLAT = dict.fromkeys(UNKNOWN) | KNOWN


def test_the_lists_of_the_docs_are_true() -> None:
    text = (Path(__file__).parents[1] / "docs/report.md").read_text("utf-8")
    greater, less, other = (
        re.findall(r"`([^`]+)`", text.partition(begin)[2].partition(end)[0])
        for begin, end in (
            ("- Greater is better: ", "- Less"),
            ("- Less is better: ", "Reports do not"),
            ("Reports do not know other names, such as ", "If the direction"),
        )
    )
    assert len(greater) > 20 and len(less) > 20 and len(other) == 5
    for name in (*greater, *less):
        assert higher_is_better(name.replace("…", "1") + "x" * name.endswith("/")) is (
            name in greater
        )
    for name in other:
        with pytest.raises(UserError, match="does not show which direction"):
            higher_is_better(name)


ASKED = "my/ / lossless val/acc_std valuable overlap clients/quality_worst10 准确率 top5"


@pytest.mark.parametrize("name", ["", *ASKED.split()])
def test_of_other_names_it_is_asked(name: str) -> None:
    with pytest.raises(UserError, match="does not show which direction"):
        higher_is_better(name)


def test_suffixes_of_clients_our_own_names_and_case() -> None:
    greater = (
        "clients/auc_worst10 clients/acc_finetuned_worst10 clients/f1_weighted VAL/ACC testAcc"
    )
    less = (
        "clients/loss_worst10 clients/loss_std divergence/all consensus_relative/net.acc trainLoss"
    )
    less += " hessian/trace global/gap global/grad_norm global/train_loss time/round Val/LOSS"
    for name in f"{greater} val/mAP drift/cosine".split():
        assert higher_is_better(name), name
    for name in f"{less} communication/up_bytes cost/gradients".split():
        assert not higher_is_better(name), name


def classes() -> Iterator[tuple[str, bool]]:
    """Every metric class of torchmetrics that says which way it is better."""
    seen = [torchmetrics.Metric]
    for parent in seen:
        seen += [child for child in parent.__subclasses__() if child not in seen]
    for module in (
        torchmetrics,
        *dict(inspect.getmembers(torchmetrics, inspect.ismodule)).values(),
    ):
        seen += [c for _, c in inspect.getmembers(module, inspect.isclass) if c not in seen]
    for each in seen:
        greater = getattr(each, "higher_is_better", None)
        if each.__module__.startswith("torchmetrics.") and isinstance(greater, bool):
            yield each.__name__, greater


def test_no_class_of_torchmetrics_is_taken_the_other_way() -> None:
    known, asked = dict[str, bool](), set[str]()
    for name, greater in classes():
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
        for each in (name, snake, f"val_{name}", f"val/{snake}"):
            try:
                known[each] = higher_is_better(each)
                assert known[each] is greater, each
            except UserError:
                asked.add(each)
    assert len(known) > 60 and len(known) + len(asked) > 300
    assert known["BinaryAUROC"] and known["multiclass_accuracy"] and not known["mean_squared_error"]


# ---- where it decides: who is best in a report, what a sweep selects, the worst clients, best.ckpt


@pytest.mark.parametrize("name", ["val/acc", "val/loss", "val/quality"])
def test_reports_and_sweeps_go_by_it(tmp_path: Path, name: str) -> None:
    make_arm(tmp_path, "low", {0: 0.25}, name)
    make_arm(tmp_path, "high", {0: 0.75}, name)
    found = find([tmp_path])
    candidates = [
        Candidate("arm", {"lr": level}, (PlannedRun(tmp_path, f"{level}/seed-0", "arm", 0, ()),))
        for level in ("low", "high")
    ]
    states = {candidate.runs[0]: DONE for candidate in candidates}

    def best() -> str:
        (table,) = [scores(summarise(found, name))]
        return next(row[0].text for row in table.rows if row[1].mark == "best")

    def chosen(mode: str | None = None) -> Any:
        selection = Selection({"lr": ("low", "high")}, name, 0.1, (0,), mode=mode)
        return choose(tmp_path, selection, candidates, states)["arm"]

    if FLAT[name] is None:
        with pytest.raises(UserError, match=re.escape(name) + ".*Give report --mode"):
            best()
        with pytest.raises(UserError, match=re.escape(name) + ".*select.mode"):
            chosen()
        found.directions.given[name] = "min"
        assert best() == "low" and chosen("min") == {"lr": "low"}
        assert chosen("max") == {"lr": "high"}
    else:
        expected = "high" if FLAT[name] else "low"
        assert best() == expected and chosen() == {"lr": expected}


class Naming(Lit):
    """Logs under all names a value that rises from round to round, and from client to client."""

    def __init__(self, names: Any = tuple(KNOWN)) -> None:
        super().__init__()
        self.names = names

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for name in self.names:
            self.log(name, batch[0].mean() + self.current_epoch)


class Named(RunCheckpoint):
    """One of several in a run, in a folder of its own."""

    @property
    def state_key(self) -> str:
        return f"Named{self.monitor}"


def fit(root: Path, learner: Any, *callbacks: Any) -> Any:
    """Two rounds in ``root``; the module, or what the callbacks raise before round 0."""
    module = federated(learner)
    runs = trainer(2, callbacks, default_root_dir=str(root), enable_checkpointing=True)
    try:
        runs.fit(module, data())
    except UserError:
        assert module.run.state.rounds == 0
        raise
    return module


def keeping(folder: Path, name: str, mode: str | None = None) -> Named:
    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    return Named(RunFolderWriter(folder, None, "", False), name, mode)


def test_the_worst_clients_and_the_best_checkpoint_go_by_it(tmp_path: Path) -> None:
    checkpoints = {name: keeping(tmp_path / str(j), name) for j, name in enumerate(KNOWN)}
    module = fit(tmp_path, Naming(), seen := PerClientEvaluation(), *checkpoints.values())
    for name, greater in KNOWN.items():
        bare = re.sub("^val[/_.]", "", name)
        values = seen.table[bare].values()
        logged = module.trainer.callback_metrics[f"clients/{bare}_worst10"]
        assert float(logged) == pytest.approx((min if greater else max)(values)), name
        assert checkpoints[name].best_round == int(greater), name
    best = torch.load(tmp_path / "0/checkpoints/best.ckpt", weights_only=True)
    assert best["epoch"] == 1 and len({round(v, 6) for v in values}) > 1


def test_going_on_from_the_best_leaves_it_beside_a_later_last(tmp_path: Path) -> None:
    """val/loss rises from round to round, so the best is that of round 0."""
    kept = keeping(tmp_path, "val/loss")
    fit(tmp_path, Naming(("val/loss",)), kept)
    best = tmp_path / "checkpoints/best.ckpt"
    bits = best.read_bytes()
    assert kept.best_round == 0 and bits != (tmp_path / "checkpoints/last.ckpt").read_bytes()
    again = keeping(tmp_path, "val/loss")
    settings = {"default_root_dir": str(tmp_path), "enable_checkpointing": True}
    longer = trainer(3, [again], **settings)
    longer.fit(federated(Naming(("val/loss",))), data(), ckpt_path=best)
    assert again.best_round == 0 and best.read_bytes() == bits


def test_going_on_from_a_kept_checkpoint_leaves_the_best_of_later_rounds(tmp_path: Path) -> None:
    """val/acc rises from round to round, so the best is that of the last round before it."""
    kept = keeping(tmp_path, "val/acc")
    fit(tmp_path, Naming(("val/acc",)), kept)
    folder = tmp_path / "checkpoints"
    shutil.copy(folder / "last.ckpt", folder / "kept.ckpt")
    bits = (folder / "kept.ckpt").read_bytes()
    settings = {"default_root_dir": str(tmp_path), "enable_checkpointing": True}
    last = torch.load(folder / "kept.ckpt", weights_only=True)["epoch"]
    longer = trainer(last + 2, [keeping(tmp_path, "val/acc")], **settings)
    longer.fit(federated(Naming(("val/acc",))), data(), ckpt_path=folder / "last.ckpt")
    assert (folder / "best.ckpt").read_bytes() != bits
    # No round is left to do: the best is that of the kept checkpoint, not of a dropped round.
    again = trainer(last + 1, [keeping(tmp_path, "val/acc")], **settings)
    again.fit(federated(Naming(("val/acc",))), data(), ckpt_path=folder / "kept.ckpt")
    assert (folder / "best.ckpt").read_bytes() == bits


@pytest.mark.parametrize("name", ["val/quality", "val-accuracy.best"])
def test_where_it_is_not_known_a_fit_asks_before_round_0(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match="--monitor_mode"):
        fit(tmp_path, Naming((name,)), keeping(tmp_path, name))
    with pytest.raises(UserError, match=r"PerClientEvaluation: which way .*modes="):
        fit(tmp_path, Naming((name,)), PerClientEvaluation(), keeping(tmp_path, name, "min"))
    modes, kept = {name: "min"}, keeping(tmp_path, name, "min")
    module = fit(tmp_path, Naming((name,)), seen := PerClientEvaluation(modes=modes), kept)
    assert kept.best_round == 0
    bare = re.sub("^val[/_.-]", "", name)
    worst = module.trainer.callback_metrics[f"clients/{bare}_worst10"]
    assert float(worst) == pytest.approx(max(seen.table[bare].values()))


def test_without_a_monitor_a_fit_asks_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = RunCheckpoint(keeping(tmp_path, "x").run)
    fit(tmp_path, Naming(("val/quality",)), checkpoint)
    assert checkpoint.best is None
    assert "--monitor val/quality --monitor_mode max (or min)" in capsys.readouterr().out


# ---- a learner that logs torchmetrics


class Telling(Lit):
    """Its metrics say which way they are better, and their names say the other way, or nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()
        self.pair = torchmetrics.MetricCollection(
            {"quality": torchmetrics.MeanAbsoluteError()}, prefix="val/"
        )

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.error(loss, loss)
        self.log("train/f1", self.error)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        out = self.net(batch[0])[:, 0]
        self.error(out, batch[1].to(out))
        self.log("val/acc", self.error)
        self.pair(out, batch[1].to(out))
        self.log_dict(self.pair)


MODES = {"train/f1": "min", "val/acc": "min", "val/quality": "min"}


def test_what_torchmetrics_say_decides_and_is_written_down(tmp_path: Path) -> None:
    checkpoint = keeping(tmp_path, "val/quality")
    record = RunRecord("{}", ["fl-lightning", "fit"])
    module = fit(tmp_path, Telling(), checkpoint, PerClientEvaluation(1), record)
    table = module.trainer.callback_metrics
    written = json.loads((tmp_path / "run.json").read_text())["modes"]
    assert checkpoint.mode == "min"
    assert {k: mode for k, mode in written.items() if not k.startswith("clients/")} == MODES
    assert written["clients/quality_worst10"] == "min" and "clients/quality_std" not in written
    # an error under the name of an accuracy
    assert table["clients/acc_worst10"] >= table["clients/acc"]


def test_a_resumed_run_keeps_what_was_written(tmp_path: Path) -> None:
    where = {"default_root_dir": str(tmp_path), "enable_checkpointing": True}
    path = tmp_path / "run.json"
    record = [keeping(tmp_path, "val/quality"), RunRecord("{}", [])]
    trainer(1, record, **where).fit(federated(Telling()), data())
    written = json.loads(path.read_text())
    assert written["modes"] == MODES
    path.write_text(json.dumps({**written, "modes": {"val/mine": "min", "val/x": 3}}))
    again = keeping(tmp_path, "val/quality")
    fit = trainer(2, [again, RunRecord("{}", [])], **where)
    fit.fit(federated(Telling()), data(), ckpt_path=str(tmp_path / "checkpoints/last.ckpt"))
    assert json.loads(path.read_text())["modes"] == {**MODES, "val/mine": "min"}
    assert again.mode == "min"
    expected = min(record[0].best, float(fit.callback_metrics["val/quality"]))
    assert again.best == pytest.approx(expected)  # type: ignore[attr-defined]


def test_reports_and_sweeps_read_what_torchmetrics_said(tmp_path: Path) -> None:
    make_arm(tmp_path, "low", {0: 0.25}, "val/quality")  # an older run, that recorded none
    modes = {"val/quality": "min", "val/acc": ["?"]}
    make_arm(tmp_path, "high", {0: 0.75}, "val/quality", modes=modes)
    table = scores(summarise(find([tmp_path]), "val/quality"))
    assert [row[1].mark for row in table.rows if row[0].text == "low"] == ["best"]
    runs = [PlannedRun(tmp_path, f"{level}/seed-0", "arm", 0, ()) for level in ("low", "high")]
    candidates = [Candidate("arm", {"lr": run.place}, (run,)) for run in runs]
    selection = Selection({"lr": ("low", "high")}, "val/quality", 0.1, (0,))
    chosen = choose(tmp_path, selection, candidates, dict.fromkeys(runs, DONE))
    assert chosen["arm"] == {"lr": "low/seed-0"}
    make_arm(tmp_path, "other", {0: 0.5}, "val/quality", modes={"val/quality": "max"})
    with pytest.raises(UserError, match=r"val/quality is not known .runs recorded both"):
        scores(summarise(find([tmp_path]), "val/quality"))


def test_it_is_asked_for_where_it_decides_and_nowhere_else(tmp_path: Path) -> None:
    make_arm(tmp_path / "one", "arm", {0: 0.25, 1: 0.5}, "val/quality")
    # one arm: nobody to be better than
    assert scores(summarise(find([tmp_path / "one"]), "val/quality")).rows
    with pytest.raises(UserError, match="--mode"):
        summarise(find([tmp_path / "one"]), "val/quality", ["0.3"])
    (note, *_) = summarise(find([tmp_path / "one"]), "val/typo", ["0.3"]).notes
    assert note.startswith("No run logs val/typo")
    make_arm(tmp_path / "two", "a", {0: 0.25, 1: 0.5}, "val/quality")
    make_arm(tmp_path / "two", "b", {0: 0.75, 1: 0.5}, "val/quality")
    # a difference has no better end
    assert len(summarise(find([tmp_path / "two"]), "val/quality").pairs) == 1
    claims = tmp_path / "claims.yaml"
    text = "- {id: A, a: b, b: a, metric: val/quality, direction: greater, margin: 0.0MODE}"
    claims.write_text(text.replace("MODE", ""))
    assert summarise(find([tmp_path / "two"]), claims=claims).verdicts
    make_arm(tmp_path / "two", "c", {0: 0.75, 1: 0.5}, "val/quality", status="diverged")
    claims.write_text(text.replace("MODE", "").replace("a: b, b: a", "a: a, b: c"))
    with pytest.raises(UserError, match="or mode in the claim: max where"):
        summarise(find([tmp_path / "two"]), claims=claims)
    claims.write_text(text.replace("MODE", ", mode: max").replace("a: b, b: a", "a: a, b: c"))
    # c has 0
    assert summarise(find([tmp_path / "two"]), claims=claims).verdicts[0].interval.mean == 0.375
    claims.write_text(text.replace("MODE", ", mode: best"))
    with pytest.raises(UserError, match=r"mode='best' is not accepted; it has to be"):
        read_claims(claims, ())


def test_a_selection_asks_what_a_diverged_run_has_only_where_one_diverged(tmp_path: Path) -> None:
    make_arm(tmp_path, "low", {0: 0.25}, "val/quality", status="diverged")
    run = PlannedRun(tmp_path, "low/seed-0", "arm", 0, ())
    selection = Selection({"lr": ("low",)}, "val/quality", 0.1, (0,))
    with pytest.raises(UserError, match=r"select\.mode"):
        choose(tmp_path, selection, [Candidate("arm", {"lr": 1}, (run,))], {run: DIVERGED})


def test_the_best_of_a_table_goes_by_it() -> None:
    columns = {"val/acc": [0.2, 0.4], "val/loss": [0.3, 0.1], "val/x": [1.0, 2.0]}
    table = Metrics([0, 1], columns, {"val/acc": "min"})
    assert table.best("val/loss") == (0.1, 1) and table.best("val/acc") == (0.2, 0)
    assert table.best("val/x", mode="max") == (2.0, 1)
    with pytest.raises(UserError, match="mode="):
        table.best("val/x")


def test_a_nan_that_was_logged_is_the_last_value(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    rows = "0,0.5,1.0,nan\n1,0.8,0.4,nan\n2,0.1,nan,nan\n3,,,\n"
    path.write_text(f"round,val/acc,val/loss,val/dead\n{rows}")
    table = Metrics.read(path)
    assert table.last("val/acc") == 0.1  # round 3 has no value
    assert math.isnan(table.last("val/loss")) and table.best("val/loss", mode="min") == (0.4, 1)
    assert table.described("val/loss") == "last nan, best 0.4 (round 2)"
    assert table.described("val/dead") == "last nan"
    assert math.isnan(table.best("val/dead", mode="min")[0])
    assert math.isnan(table.last("val/none")) and np.isnan(table["val/acc"][3])
