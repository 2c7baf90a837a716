"""How well each client is served by the model that it would use itself, measured on its own test
samples.

K. Wang, R. Mathews, C. Kiddon, H. Eichner, F. Beaufays, D. Ramage: Federated Evaluation of
On-device Personalization (2019), arXiv:1910.10252: before and after some local training. T. Li, M.
Sanjabi, A. Beirami, V. Smith: Fair Resource Allocation in Federated Learning (ICLR 2020),
arXiv:1905.10497: deviation and the worst 10 % of clients.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from fl_lightning.errors import UserError
from fl_lightning.evaluation import personal_models
from fl_lightning.evaluation.client_tables import (
    ClientRounds,
    by_domain,
    client_rows,
    draw_clients,
    heading,
    over_domains,
    rows_of_domains,
)
from fl_lightning.evaluation.measurement import Measurement
from fl_lightning.evaluation.validated_model import evaluated
from fl_lightning.introspection.accepted import NonNegativeFloat, PositiveInt
from fl_lightning.metrics import (
    Directions,
    comma_separated,
    is_accuracy,
    without_prefix,
)
from fl_lightning.sampling import generator
from fl_lightning.storage.atomic_files import written_aside

Values = dict[str, dict[int, float]]  # metric → client → value
TUNED = "_finetuned"

# Clients whose samples are tried before the first round, if a metric cannot be computed.
TRIED = 10


class PerClientEvaluation(Measurement):
    """Logs ``clients/acc``, ``clients/loss``, …: each client's own model on its own test samples.

    The model is the one that a client would use: the evaluated model with the client's own kept
    parts, or the result of the method's ``personal``. A client that never finished a round uses the
    evaluated model. The evaluated model is w, unless a method (FedExP) or Lightning's
    ``WeightAveraging`` evaluates another one. Each client is measured as ``Trainer.validate`` would
    measure it on only its test samples: with the learner's validation hooks, in batches of
    ``data.eval_batch_size``, and with the reductions that ``self.log`` asks for. The metrics are
    those that the learner logs then, without the prefix (``val/acc`` → ``clients/acc``). If it logs
    no loss, the loss is that of ``training_step`` in evaluation mode. If ``validation_step``
    requires ``dataloader_idx``, it gets 0.

    Logged for each metric, over the k clients with test samples and a value: the mean,
    ``_weighted`` by their numbers of test samples, the standard deviation ``_std`` (k - 1), and the
    mean ``_worst10`` of the ⌈k/10⌉ worst. A client whose value is NaN is left out. AUROC,
    average precision and similar metrics leave out the classes that a client's samples lack, and
    are NaN without any other class, although torchmetrics counts 0 for a class that is absent.
    ``modes`` says which direction is better, else the learner's torchmetrics, else the name; if
    none of them does, an error before round 0 asks you for ``modes``.
    With fine-tuning it logs the same for ``clients/acc_finetuned``, ….

    If clients belong to domains (``client_domains``, as with ``FromFolders``), it also logs
    ``domains/acc/<domain>`` (the domain's clients, weighted by test samples), ``domains/acc_mean``
    over domains and ``domains/acc_worst``, and writes ``domains.csv``.

    If a run has a folder (``default_root_dir``, ``RunFolder``, a logger's), it writes
    ``clients_rounds.csv`` there (round, client, samples, every metric), and at the end
    ``clients.csv`` and ``clients.png`` of the last round, whose values are in ``table``. The
    measurement comes after the round, on a copy of the learner, and changes no bit of the training.
    Sent and kept: nothing that counts as communication. Over sites each site measures its own
    clients and sends their values. A client with fewer test samples than its site's
    ``fewest_samples`` counts as a client without any. If a site does not answer in time, its
    clients are left out of that round's numbers.

    Args:
        every_n_rounds: k: measure if (t + 1) mod k = 0, and after the last round; None: only after
            the last.
        clients: number of clients, drawn once from the run's seed; or ``"all"``.
        finetune_epochs: measure once more after so many local epochs from the personal model, with
            the client optimizer at the rate of the round just finished. Fine-tuning uses no methods
            and no clipping, and its result is not kept.
        modes: ``"max"`` or ``"min"``, the better direction of metrics whose name does not show it:
            ``{"quality": "max"}``.

    Raises:
        UserError: no client has test samples of its own, or an argument is not accepted.

    Example:
        Under FedAvg every client has the same model, but the model does not serve all of them
        equally well.

        >>> from fl_lightning.callbacks import PerClientEvaluation
        >>> from fl_lightning.testing import tiny_run
        >>> logged = tiny_run(PerClientEvaluation()).trainer.callback_metrics
        >>> sorted(name for name in logged if name.startswith("clients/acc"))
        ['clients/acc', 'clients/acc_std', 'clients/acc_weighted', 'clients/acc_worst10']
    """

    # If clients have their own models, these values are shown in place of the validation's.
    of_own_models = True

    prefixes = ("clients/", "domains/")

    def __init__(
        self,
        every_n_rounds: int | None = None,
        clients: PositiveInt | Literal["all"] = "all",
        finetune_epochs: NonNegativeFloat = 0,
        modes: Mapping[str, Literal["max", "min"]] | None = None,
    ) -> None:
        super().__init__(every_n_rounds)
        self.clients = clients
        self.finetune_epochs = finetune_epochs
        self.modes = dict(modes or {})
        self.table: Values = {}
        self.samples: dict[int, int] = {}
        self._asked = False  # whether to ask for directions that are not known
        self._told = set[str]()  # metrics for which some client had no value
        self._later: int | None = None  # rows of rounds from here on are still to be dropped
        # The clients' names, if the data have names.
        self.names: Sequence[str] = ()
        # The clients' domains, if the data have domains, and the direction of each metric.
        self.domains: Sequence[str] = ()
        self._greater: dict[str, bool] = {}

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        data = trainer.datamodule
        if stage != "fit" or data is None or personal_models.elsewhere(trainer) is not None:
            return
        if not getattr(data, "tests_clients", False):
            raise UserError(
                "PerClientEvaluation: no client has test samples of its own: give "
                "data.client_test_fraction, the share of its samples that each client holds out, "
                "such as 0.25, or test_clients, each one's own test set."
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_start(trainer, pl_module)
        self._told.clear()
        self._asked = False
        self._later = trainer.current_epoch

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Evaluate one client before the first round, to find the names of the metrics."""
        super().on_train_epoch_start(trainer, pl_module)
        # Now the run knows whether you must give a metric's direction, so do not wait for the last
        # round.
        if self._asked:
            return
        away = personal_models.elsewhere(trainer)
        if away is None:
            self._asked = True
            values = self._of_one_client(trainer, pl_module)
        else:
            values = away.one_client(pl_module)
        if values is not None:
            self._asked = True
            self._directions(pl_module, named(values))

    def _of_one_client(self, trainer: Any, module: Any) -> dict[str, float] | None:
        """Return the model's values on the test samples of the first client that has any.

        Raises:
            UserError: a metric cannot be computed for any of the first clients.
        """
        evaluator = module.evaluator()
        w, evaluator.buffers = evaluated(module.global_model, trainer)
        values: dict[str, float] | None = None
        for client in self._drawn(module):
            indices = trainer.datamodule.client_test_indices(client)
            if len(indices):
                values = evaluator.validated(w, client, indices)
                failures = evaluator.failures.get(client)
                if failures is None:
                    return values
                if len(evaluator.failures) == TRIED:
                    break
        if values is not None:
            clients = ", ".join(map(str, evaluator.failures))
            raise UserError(
                f"PerClientEvaluation: {failures[0]} on the test samples of client {clients}. "
                "Change the metric, or log another one. Nothing was started."
            )
        return None

    def _drawn(self, module: Any) -> Sequence[int]:
        """Return the clients that are evaluated, ascending."""
        m = int(module.trainer.datamodule.num_clients)
        wanted = m if self.clients == "all" else min(int(self.clients), m)
        draw = generator(module.run_seed, "per-client evaluation")
        if wanted == m:
            return range(m)
        return sorted(draw.choice(m, wanted, replace=False, shuffle=False).tolist())

    def _directions(self, module: Any, names: Collection[str]) -> Directions:
        """Return the better direction of each of these metrics.

        Raises:
            UserError: the direction of a metric is not known.
        """
        by_user: dict[str, str] = {}
        for name, mode in self.modes.items():
            by_user[without_prefix(name.removeprefix("clients/"))] = mode
        directions = Directions("Give modes={name: mode}, a mode", by_user)
        directions.record(_of_validation(module.logged.modes))
        unknown = [name for name in names if directions.known(name) is None]
        if unknown:
            raise UserError(f"PerClientEvaluation: {directions.question(unknown)}")
        return directions

    def measure(self, module: Any) -> dict[str, float]:
        trainer = module.trainer
        ids = self._drawn(module)
        away = personal_models.elsewhere(trainer)
        if away is None:
            tests = trainer.datamodule.client_test_indices
            measured = personal_models.measured(module.run, trainer, ids, self.finetune_epochs)
            self.samples = {client: len(tests(client)) for client in ids}
        else:
            measured, self.samples = away.measured(module, ids, self.finetune_epochs)
        data = module.run.loop.cohort.data
        self.names = tuple(data.client_names)
        self.domains = () if away is not None else tuple(getattr(data, "client_domains", ()))
        self.table = {}
        table: Values = {}
        for client, kinds in measured.items():
            for suffix, values in kinds.items():
                for name, value in named(values).items():
                    table.setdefault(name + suffix, {})[client] = value
        # NaN is not a value: for example the AUROC of samples of one class.
        for name, column in table.items():
            known = {client: value for client, value in column.items() if not math.isnan(value)}
            self.table[name] = known
        for text in self.remarks(away is not None):
            module.note(text)
        directions = self._directions(module, [name.removesuffix(TUNED) for name in self.table])
        modes = _of_validation(module.logged.modes)
        logged = dict[str, float]()
        for name, by_client in self.table.items():
            if not by_client:
                continue
            metric = name.removesuffix(TUNED)
            greater = directions.greater(metric)
            for suffix, value in summary(by_client, self.samples, greater).items():
                if not math.isnan(value):
                    logged[f"clients/{name}{suffix}"] = value
                # Reports also compare runs by these values and need their direction. A deviation
                # has none.
                if metric in modes and suffix != "_std":
                    module.logged.modes[f"clients/{name}{suffix}"] = modes[metric]
            self._greater[name] = greater
            for title, value in self._of_domains(name).items():
                logged[title] = value
                module.logged.modes[title] = "max" if greater else "min"
        return logged

    def _of_domains(self, name: str) -> dict[str, float]:
        """Return a metric by domain, its mean over domains, and that of the worst domain."""
        if not self.domains:
            return {}
        values = by_domain(self.table[name], self.samples, self.domains)
        found = {f"domains/{name}/{domain}": value for domain, value in values.items()}
        for kind, value in over_domains(values, self._greater[name]).items():
            found[f"domains/{name}{kind}"] = value
        return found

    def remarks(self, over_sites: bool) -> Iterator[str]:
        """Return notes about what the numbers do not show."""
        without = sum(not number for number in self.samples.values())
        if without:
            few = ", or fewer than their sites' fewest_samples" if over_sites else ""
            yield (
                f"PerClientEvaluation: {without} of {len(self.samples)} clients hold no test "
                f"sample{few}, and are left out of its numbers"
            )
        tested = [client for client, number in self.samples.items() if number]
        for name, column in self.table.items():
            lacking = len(tested) - len(column)
            # The number of clients without a value may change from round to round.
            if lacking and name not in self._told:
                self._told.add(name)
                yield (
                    f"PerClientEvaluation: {lacking} of {len(tested)} clients have no value of "
                    f"{name} (it is NaN, or not logged), and are left out of its numbers"
                )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        super().on_train_end(trainer, pl_module)
        ended = self._measured == self._ended >= 0 and self.run_ends(trainer, pl_module)
        folder = folder_of(trainer)
        if not ended or folder is None:
            return
        rows = [heading(self.table, self.names)]
        rows += client_rows(self.table, self.samples, self.names)
        with written_aside(folder / "clients.csv") as file:
            file.write(comma_separated(rows).encode())
        if self.domains:
            lines = rows_of_domains(self.table, self.samples, self.domains, self._greater)
            with written_aside(folder / "domains.csv") as file:
                file.write(comma_separated(lines).encode())
        names = [name for name in self.table if not name.endswith(TUNED)]
        others = [name for name in names if name != "loss"]
        shown = next(filter(is_accuracy, others), (others or ["loss"])[0])
        # Delete the picture of an earlier round: there is one only for the last round.
        (folder / "clients.png").unlink(missing_ok=True)
        if shown in self.table:
            with written_aside(folder / "clients.png", durable=False) as file:
                draw_clients(file, shown, self.table[shown], self.table.get(shown + TUNED, {}))

    def _measure(self, trainer: Any) -> None:
        super()._measure(trainer)
        folder = folder_of(trainer)
        if folder is not None:
            rounds = ClientRounds(folder / "clients_rounds.csv")
            if self._later is not None:
                # Until this fit has rows of its own, a resume from a later checkpoint needs these.
                rounds.keep(before=min(self._later, self._measured))
                self._later = None
            rounds.add(self._measured, self.table, self.samples, self.names)


def folder_of(trainer: Any) -> Path | None:
    """Return the folder in which this process writes files of the run; None: it writes none.

    That is the run's own folder, else the folder of its first logger. Nothing is written to the
    current folder, which is Lightning's default: there the next run would overwrite it.
    """
    if not trainer.is_global_zero:
        return None
    folders = [trainer.default_root_dir]
    for logger in trainer.loggers:
        folders.append(getattr(logger, "log_dir", None) or logger.save_dir)
    own = [Path(folder) for folder in folders if folder]
    here = Path.cwd().resolve()
    return next((folder for folder in own if folder.resolve() != here), None)


def named(values: dict[str, float]) -> dict[str, float]:
    """Return metrics without the validation's prefix; the validation's loss replaces that of the
    training step.
    """
    metrics = {"loss": values["loss"]}
    for name, value in values.items():
        if name not in ("samples", "loss"):
            metrics[without_prefix(name)] = value
    return metrics


def _of_validation(modes: Mapping[str, str]) -> dict[str, str]:
    """Return the modes of the metrics that the learner logs, by the names of clients' values."""
    return {without_prefix(name): mode for name, mode in modes.items()}


def summary(values: dict[int, float], samples: dict[int, int], greater: bool) -> dict[str, float]:
    """Return a metric over k clients: mean, weighted mean, standard deviation, mean of the ⌈k/10⌉
    worst.

    >>> summary({4: 1.0, 7: 0.5}, {4: 3, 7: 1}, greater=True)
    {'': 0.75, '_weighted': 0.875, '_std': 0.3535533905932738, '_worst10': 0.5}
    """
    v = torch.tensor(list(values.values()), dtype=torch.float64)
    weights = torch.tensor([samples[client] for client in values], dtype=torch.float64)
    worst = v.sort(descending=not greater).values[: -(-len(v) // 10)]
    weighted = v @ weights / weights.sum()
    return {
        "": float(v.mean()),
        "_weighted": float(weighted),
        "_std": float(v.std()) if len(v) > 1 else math.nan,
        "_worst10": float(worst.mean()),
    }
