"""The results of clients in a site's answer: what they may hold follows from what the run declares.

An answer holds exactly what the round's methods, the learner's buffers and its metrics declare.
Whatever else it holds, lacks, or holds in another type, shape or range makes it a wrong answer. A
site's word does not decide what a metric's name stands for, or which shape its state has: the
server takes a step of its own learner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_sum

from fl_lightning.aggregation import traffic
from fl_lightning.aggregation.metric_states import MetricStates, metrics_of
from fl_lightning.aggregation.update_accumulator import ClientResult
from fl_lightning.callback_list import CallbackList
from fl_lightning.client.local_step import LocalTraining
from fl_lightning.deploy import round_messages
from fl_lightning.deploy.fields import LARGEST, MOST, Fields, check_name, finite
from fl_lightning.deploy.transport import Array
from fl_lightning.engines.engine_context import LearnerCopies, engine_context_of
from fl_lightning.engines.trials.dry_run import DryRun, tried_apart
from fl_lightning.learner.attributes import Attributes
from fl_lightning.learner.buffers import COUNTER
from fl_lightning.loop import FederatedLoop
from fl_lightning.round.client_group import LOSS
from fl_lightning.round.context import Round
from fl_lightning.round.declared_state import Upload

Decode = Callable[[dict[str, Array], int, int], Tensor]
# Only the server measures under these prefixes.
OF_SERVER = ("val/", "test/", "clients/", "domains/", "time/", "cost/", "communication/", "lr-")
# Loggers and checkpoints read these of the server's fit.
RESERVED = frozenset(
    {"epoch", "step", "global_step", "round", "client_lr", "server_lr", "hp_metric"}
)
MOST_NAMES = 1000  # of metrics that a client logs in a run, and the server's own step does not
UNFIT = f"it is not finite, or above {MOST:.2g}"
# States by which torchmetrics divide; also where they are fractions they count from 0.
DIVISORS = frozenset({"weight", "total", "count", "num_obs", "n_total", "num_total"})
MOST_COUNTED = 2**31  # by how much a buffer that counts may grow in a round
LARGEST_FLOAT = 2.0**127  # nearly the largest number of single precision
ALONE = -1  # of a name: the value of a metric whose states cannot be merged
Kind = int | None  # of a name: the place of a metric in the learner, ALONE, or None: a mean


@dataclass
class KnownMetrics:
    """What the server knows of the metrics that clients log.

    Args:
        kinds: of each name that a step of the server's own learner logs.
        shapes: of each state that this step updates, by the metric's place and the state's name.
        heard: the names in all answers so far.
        others: by client, those of its names that are not among ``kinds``.
        changed: names of the learner's attributes that the step changed.
    """

    kinds: dict[str, Kind] = field(default_factory=lambda: {LOSS: None})
    shapes: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict)
    heard: set[str] = field(default_factory=set)
    others: dict[int, set[str]] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)

    def try_step(self, run: Any, trainer: Any) -> None:
        """Take a step on the server's own samples, on a copy, which changes nothing of the run.

        If no step can be taken, nothing is known of what steps log.
        """
        cohort = run.cohort(trainer)
        settings = run.settings
        work = LocalTraining(
            trainer.datamodule, CallbackList([]), cohort.seed, accumulate=settings.accumulate
        )
        situation = engine_context_of(trainer, settings, run.model, run.optimizers, work, cohort)
        copies = LearnerCopies(situation)
        copies.treat_as_buffers(run.model.as_buffers)
        try:
            with tried_apart(situation):
                trial = DryRun(copies)
                before = Attributes(trial.copy.learner)
                trial.run(cohort.tried(0)[0], 1)
        except Exception:
            # The server's samples need not suffice for a step, and hooks may come later.
            return
        self.changed = before.changed_by_learner(trial.copy.learner)
        metrics = trial.metrics[-1] if trial.metrics else None
        self.kinds |= kinds_of(trial.logged, metrics)
        self.shapes |= shapes_of(metrics)


def kinds_of(logs: Mapping[str, Any], metrics: MetricStates | None) -> dict[str, Kind]:
    """Return what the names stand for that a client logs."""
    kinds: dict[str, Kind] = dict.fromkeys(logs)
    if metrics is not None:
        kinds |= metrics.names
        kinds |= dict.fromkeys(metrics.alone, ALONE)
    return kinds


def shapes_of(metrics: MetricStates | None) -> dict[tuple[int, str], tuple[int, ...]]:
    """Return the shapes of a client's states of metrics; a list has none."""
    shapes = {}
    for j, (_, states) in ({} if metrics is None else metrics.states).items():
        for name, value in states.items():
            shapes[j, name] = tuple(value.shape) if isinstance(value, Tensor) else ()
    return shapes


class Results:
    """Reads what clients bring in one round.

    Args:
        decode: ``decode`` of the method that owns ``transmit``, if it has one.
        measured: names of metrics that the server itself measures.
        known: what the server knows of clients' metrics. Only answers that are accepted add to it.

    ``withheld``: of each client that finished, whether its logs and metrics stay at its site.
    ``left``: fields of the present answer whose values do not count, each with the reason.
    """

    def __init__(
        self,
        round: Round,
        loop: FederatedLoop,
        decode: Decode | None,
        measured: set[str],
        known: KnownMetrics,
    ) -> None:
        self.round = round
        self.methods = loop.methods
        self.decode = decode
        self.measured = measured
        self.known = known
        self.withheld: list[bool] = []
        self.left: list[tuple[str, str]] = []
        self.size = round.layout.size
        declared = self.methods.declared
        self.uploads = {key: each for key, each in declared.items() if isinstance(each, Upload)}
        self.rows = {
            key: each for key, each in declared.items() if each.keeps_rows and each.comes_from_sites
        }
        self.metrics = metrics_of(loop.model.learner)
        policy = loop.buffers
        averaged = {n: v for n, v in round.buffers.items() if policy.averages(n, v)}
        self.buffers = {n: v for n, v in averaged.items() if _is_real(v)}
        self.maxima = {n: v for n, v in averaged.items() if not _is_real(v)}
        # Which clients train which coordinates: each client says so itself.
        self.holds = self.methods.owner("trained") is not None and round.trained is None

    def of_client(self, fields: Fields, client: int) -> ClientResult:
        """Return one client's results."""
        home = ClientResult(client, self._counts(fields))
        home.finished = fields.flag("finished")
        if home.finished:
            self._update(fields, home)
            self._uploads(fields, home)
            self._buffers(fields, home)
            self._rows(fields.under("row"), home)
            home.kept = fields.optional("kept")
            home.withheld = fields.optional("withheld", 1, 1) is not None
            if not home.withheld:
                home.logs = self._logs(fields.under("log"))
                if fields.optional("metrics", 1, 1):
                    home.metrics = self._metric_states(fields)
        fields.end()
        self._check_kinds(fields, home)
        return home

    def accept(self, homes: Iterable[ClientResult]) -> None:
        """Note what an answer that counts logs."""
        for home in homes:
            self.withheld += [home.withheld] * home.finished
            logged = kinds_of(home.logs, home.metrics).keys()
            self.known.heard |= logged
            if others := logged - self.known.kinds.keys():
                self.known.others.setdefault(home.client, set()).update(others)

    def _check_kinds(self, fields: Fields, home: ClientResult) -> None:
        """Refuse a name that is another metric's at the server, or one name too many."""
        kinds = kinds_of(home.logs, home.metrics)
        known = self.known.kinds
        for name, kind in kinds.items():
            if known.get(name, kind) != kind:
                word = {None: "log", ALONE: "alone"}.get(kind, "name")
                fields.wrong(f"{word}/{name}", "is the name of another metric in this run")
        others = (kinds.keys() - known.keys()) | self.known.others.get(home.client, set())
        if len(others) > MOST_NAMES:
            fields.wrong("log/…", f"brings this client to more than {MOST_NAMES} names of metrics")

    def _counts(self, fields: Fields) -> list[int]:
        counts = fields.integers("counts", 0, 2**40, traffic.COUNTS)
        if counts[traffic.CLIENTS] != 1 or counts[traffic.DOWN_PARAMETERS] > self.size:
            fields.wrong("counts", "does not count the traffic of one client")
        return counts

    def _update(self, fields: Fields, home: ClientResult) -> None:
        w = self.round.w
        if self.holds:
            home.holds = fields.mask("holds", self.size).to(w.device)
        where = home.sends(self.round)
        codes = fields.under("code")
        if self.decode is not None:
            home.update = self._decoded(codes, home.client).to(w.device)
            return
        codes.end()
        shape = (self.size if where is None else int(where.sum()),)
        part = fields.tensor("update", [shape], w.dtype, most=MOST)
        home.update = round_messages.spread(part, (self.size,), where).to(w.device)

    def _decoded(self, codes: Fields, client: int) -> Tensor:
        """Return the update in a method's codes, which the method's ``decode`` checks."""
        assert self.decode is not None
        arrays = {name: array.copy() for name, array in codes.arrays.items()}
        for name, array in arrays.items():
            if array.dtype.kind in "fc" and not finite(torch.from_numpy(array)):
                codes.wrong(name, "holds numbers that are not finite", finite=False)
        codes.arrays = {}
        codes.end()
        try:
            update = self.decode(arrays, self.round.t, client)
            update = torch.as_tensor(update).reshape(self.size)
        except Exception as error:
            said = f"{type(error).__name__}: {str(error)[:100]}"
            codes.wrong("…", f"is not what the method's decode accepts ({said})")
        if not update.is_floating_point() or not finite(update.to(self.round.w.dtype), MOST):
            codes.wrong("…", "stands for numbers that are not finite", finite=False)
        return update

    def _uploads(self, fields: Fields, home: ClientResult) -> None:
        came = fields.under("upload")
        absent = fields.under("absent")
        w = self.round.w
        where = home.sends(self.round)
        for key, each in self.uploads.items():
            # A hook need not assign it in each round; then the client says so.
            if key in absent.numbers:
                absent.integer(key, 1, 1)
                continue
            shape, dtype = each.sized(self.size), each.dtype or w.dtype
            shapes = [shape]
            if where is not None and shape == (self.size,):
                shapes.append((int(where.sum()),))
            # A sum of squares of numbers up to MOST may be as large as this.
            bound = MOST if each.least is None else min(MOST**2 * self.size, LARGEST_FLOAT)
            sent = came.tensor(key, shapes, dtype, most=bound)
            _check_bounds(came, key, sent, each.least, each.most)
            value = round_messages.spread(sent, shape, where)
            home.uploads[key] = value.to(w.device, dtype)
        came.end()
        absent.end()

    def _buffers(self, fields: Fields, home: ClientResult) -> None:
        device = self.round.w.device
        came = fields.under("buffer")
        for name, at_server in self.buffers.items():
            wide = torch.promote_types(at_server.dtype, torch.float32)
            change = came.tensor(name, [tuple(at_server.shape)], wide, most=MOST).to(device)
            after = (at_server.to(wide) + change).to(at_server.dtype)
            # Selecting entries takes longer than all other checks, and a mask of -inf is rare.
            if not finite(after) and not finite(after[at_server.isfinite()]):
                came.wrong(name, "makes the buffer infinite", finite=False)
            if _is_variance(name) and after.numel() and float(after.min()) < 0:
                came.wrong(name, "makes a variance negative")
            home.buffers[name] = change
        came.end()
        highest = fields.under("maximum")
        for name, at_server in self.maxima.items():
            dtype = torch.uint8 if at_server.dtype == torch.bool else at_server.dtype
            value = highest.tensor(name, [tuple(at_server.shape)], dtype).to(device)
            if COUNTER & set(name.rpartition(".")[2].lower().split("_")):
                # A client that keeps its own may be behind the server's.
                grown = value.double() - at_server.double()
                if bool((value < 0).any()) or bool((grown > MOST_COUNTED).any()):
                    highest.wrong(name, "counts less than nothing, or too far for a round")
            home.maxima[name] = value
        highest.end()

    def _rows(self, fields: Fields, home: ClientResult) -> None:
        for key, each in self.rows.items():
            dtype = each.dtype or self.round.w.dtype
            row = fields.tensor(key, [each.sized(self.size)], dtype, most=MOST)
            _check_bounds(fields, key, row, getattr(each, "least", None), None)
            home.rows[key] = row
        fields.end()

    def _logs(self, fields: Fields) -> dict[str, Tensor]:
        logs = {}
        for name in [*fields.numbers]:
            # A learner may log NaN or infinity: then the mean is that of the other clients.
            number = fields.number(name)
            if self._counts_as(fields, name, number):
                logs[name] = torch.tensor(number, dtype=torch.float64, device=self.round.w.device)
        fields.end()
        return logs

    def _counts_as(self, fields: Fields, name: str, value: float = 0.0) -> bool:
        """Return whether a client's value of a metric counts; otherwise the server's may."""
        check_name(fields, name)
        why = "" if abs(value) <= MOST else UNFIT  # NaN is in no order
        if name.startswith(OF_SERVER) or name in RESERVED:
            why = "this name is the server's"
        if why:
            self.left.append((fields.within + name, why))
        # The learner may log a name in validation, too.
        return not why and name not in self.measured

    def _metric_states(self, fields: Fields) -> MetricStates:
        found = MetricStates()
        updates = fields.under("updates")
        states = fields.under("state")
        places = {str(j): j for j in range(len(self.metrics))}
        for word in [*updates.numbers]:
            if word not in places:
                updates.wrong(word, "is not the place of a metric of the learner")
            count = updates.integer(word, 1, 2**40)
            j, of_metric = places[word], states.under(word)
            if any(place == j for place, _ in self.known.shapes):
                found.states[j] = count, self._states(of_metric, j, self.metrics[j])
        updates.end()
        states.end()
        names = fields.under("name")
        for name in [*names.numbers]:
            j = names.integer(name, 0, len(self.metrics) - 1)
            if name not in self.known.kinds:
                self.left.append((names.within + name, "the server's own step logs no such metric"))
            elif j not in found.states:
                names.wrong(name, "is the name of a metric whose states are not there")
            elif self._counts_as(names, name):
                found.names[name] = j
        names.end()
        own = fields.under("alone")
        for name in [*own.arrays]:
            array = own.array(name, "f")
            if array.shape != () or array.dtype != "float64":
                own.wrong(name, "is not a number in double precision")
            if self._counts_as(own, name, float(array)):
                found.alone[name] = torch.tensor(float(array), dtype=torch.float64)
        own.end()
        return found

    def _states(self, fields: Fields, j: int, metric: Metric) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, default in metric._defaults.items():
            # A site sends no list, because it would hold values of single samples.
            values[name] = []
            if isinstance(default, Tensor):
                values[name] = self._state(fields, j, name, default, metric._reductions[name])
        fields.end()
        return values

    def _state(self, fields: Fields, j: int, name: str, default: Tensor, reduction: Any) -> Tensor:
        # A state that begins as one number may get an axis at the first update.
        shapes = [self.known.shapes[j, name]]
        array = fields.arrays.get(name)
        dtype = default.dtype
        if array is not None and array.dtype.kind == "f" and not _is_real(default):
            dtype = torch.get_default_dtype()  # a count may become a fraction
        infinite = _is_real(default) and not finite(default)
        value = fields.tensor(name, shapes, dtype, infinite, math.inf if infinite else MOST)
        if not _is_real(value) and bool((value.double().abs() > LARGEST).any()):
            fields.wrong(name, f"counts more than {LARGEST}")
        counts = name in DIVISORS or (not _is_real(default) and reduction is dim_zero_sum)
        if counts and bool((value < 0).any()):
            fields.wrong(name, "counts less than nothing")
        return value.to(self.round.w.device)


def _check_bounds(
    fields: Fields, name: str, value: Tensor, least: float | None, most: float | None
) -> None:
    if least is not None and bool((value < least).any()):
        fields.wrong(name, f"is below {least:g}")
    if most is not None and bool((value > most).any()):
        fields.wrong(name, f"is above {most:g}")


def _is_real(value: Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _is_variance(name: str) -> bool:
    leaf = name.rpartition(".")[2]
    return leaf in ("running_var", "moving_var", "moving_variance", "running_variance")
