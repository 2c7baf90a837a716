"""The results of clients in a site's answer: what they may hold follows from what the run declares.

An answer holds exactly what the round's methods, the learner's buffers and its metrics declare.
Whatever else it holds, lacks, or holds in another type, shape or range makes it a wrong answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities.data import dim_zero_sum

from fl_lightning.aggregation import traffic
from fl_lightning.aggregation.metric_states import MetricStates, metrics_of
from fl_lightning.aggregation.update_accumulator import ClientResult
from fl_lightning.deploy import round_messages
from fl_lightning.deploy.fields import LARGEST, MOST, Fields, check_name, finite
from fl_lightning.deploy.logged import ALONE, Kind, KnownMetrics, Shape, kinds_of, shapes_of
from fl_lightning.deploy.transport import Array
from fl_lightning.learner.buffers import COUNTER
from fl_lightning.loop import FederatedLoop
from fl_lightning.round.context import Round
from fl_lightning.round.declared_state import Upload

Decode = Callable[[dict[str, Array], int, int], Tensor]
# Only the server measures under these prefixes.
OF_SERVER = ("val/", "test/", "clients/", "domains/", "time/", "cost/", "communication/")
# Loggers and checkpoints read these of the server's fit.
RESERVED = frozenset(
    {"epoch", "step", "global_step", "round", "client_lr", "server_lr", "hp_metric"}
)
MOST_NAMES = 1000  # of metrics that a client logs in a run, and the server's own step does not
UNFIT = f"it is not finite, or above {MOST:.2g}"
# States by which torchmetrics divide; also where they are fractions they count from 0.
DIVISORS = frozenset({"weight", "total", "count", "num_obs", "n_total", "num_total"})
MOST_MOMENTS = 8  # vectors of D numbers in an optimizer's state
MOST_FACTS = 2**16  # single numbers that a client keeps: of its optimizer, and of its last round
MOST_COUNTED = 2**31  # by how much a buffer that counts may grow in a round
LARGEST_FLOAT = 2.0**127  # nearly the largest number of single precision
_ROOM = 2**20  # bytes of a message for names and numbers


class Results:
    """Reads what clients bring in one round.

    Args:
        decode: ``decode`` of the method that owns ``transmit``, if it has one.
        measured: names of metrics that the server itself measures.
        known: what the server knows of clients' metrics. Only answers that are accepted add to it.
        fewest: by client, the number of samples that its site declared: logs and metrics of fewer
            samples stay at the site. 0: the site sends all.

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
        fewest: Mapping[int, int],
    ) -> None:
        self.round = round
        self.methods = loop.methods
        self.decode = decode
        self.measured = measured
        self.known = known
        self.fewest = fewest
        self.withheld: list[bool] = []
        self.left: list[tuple[str, str]] = []
        self.size = round.layout.size
        declared = self.methods.declared
        self.uploads = {key: each for key, each in declared.items() if isinstance(each, Upload)}
        kept = {key: each for key, each in declared.items() if each.keeps_rows}
        self.rows = {key: each for key, each in kept.items() if each.comes_from_sites}
        self.keeps_optimizer = loop.settings.keep_optimizer_state
        self.metrics = metrics_of(loop.model.learner)
        policy = loop.buffers
        averaged = {n: v for n, v in round.buffers.items() if policy.averages(n, v)}
        self.buffers = {n: v for n, v in averaged.items() if _is_real(v)}
        self.maxima = {n: v for n, v in averaged.items() if not _is_real(v)}
        # Which clients train which coordinates: each client says so itself.
        self.holds = self.methods.partial_training is not None and round.trained is None
        self.homes: list[ClientResult] = []

    def most_bytes(self, clients: int) -> int:
        """Return how many bytes an answer about so many clients may have."""
        numbers = 4 * self.size
        for each in (*self.uploads.values(), *self.rows.values()):
            numbers += math.prod(each.sized(self.size))
        numbers += sum(value.numel() for value in self.round.buffers.values())
        for metric in self.metrics:
            numbers += sum(map(_numel, metric._defaults.values())) + 2**16
        return (clients + 1) * (16 * numbers + _ROOM)

    def most_kept(self) -> int:
        """Return how many numbers a client may keep until its next round."""
        kept = [each for each in self.methods.declared.values() if each.keeps_rows]
        numbers = sum(math.prod(each.sized(self.size)) for each in kept)
        numbers += sum(value.numel() for value in self.round.buffers.values())
        # A copy of its parts of the model, and its optimizer's state.
        return numbers + (1 + MOST_MOMENTS * self.keeps_optimizer) * self.size + MOST_FACTS

    def of_client(self, fields: Fields, client: int) -> ClientResult:
        """Return one client's results.

        Raises:
            WrongField: they are not what the run declares.
        """
        home = ClientResult(client, self._counts(fields))
        home.finished = fields.flag("finished")
        readers = {type(callback).__name__ for callback in self.methods.callbacks}
        for name in [*(reads := fields.under("reads")).numbers]:
            if name not in readers or not reads.flag(name):
                reads.wrong(name, "is not a method of this run")
            home.mean_gradient_readers.add(name)
        if home.finished:
            self._update(fields, home)
            self._uploads(fields, home)
            self._buffers(fields, home)
            self._rows(fields.under("row"), home)
            home.kept = fields.optional("kept", 0, self.most_kept())
            home.withheld = self._withheld(fields, client)
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
            if logged := kinds_of(home.logs, home.metrics):
                self.homes.append(home)
                self.known.heard |= logged.keys()
                if others := logged.keys() - self.known.kinds.keys():
                    self.known.others.setdefault(home.client, set()).update(others)

    def disputed(self) -> set[str]:
        """Return the names about which the round's clients do not agree.

        The server does not know them from its own learner. Clients' states lose them.
        """
        said: dict[str, set[Kind]] = {}
        shapes: dict[tuple[int, str], set[Shape]] = {}
        for home in self.homes:
            for name, kind in kinds_of(home.logs, home.metrics).items():
                said.setdefault(name, set()).add(kind)
            for state, shape in shapes_of(home.metrics).items():
                shapes.setdefault(state, set()).add(shape)
        places = {j for (j, _), each in shapes.items() if len(each) > 1}
        names = {name for name, each in said.items() if len(each) > 1 or each & places}
        for home in self.homes:
            if home.metrics is not None:
                for name in names:
                    home.metrics.names.pop(name, None)
                    home.metrics.alone.pop(name, None)
                for j in places:
                    home.metrics.states.pop(j, None)
        return names

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
        most = self.most_bytes(1)
        counts = fields.integers("counts", 0, 2**40, traffic.COUNTS)
        if counts[traffic.CLIENTS] != 1 or counts[traffic.DOWN_PARAMETERS] > self.size:
            fields.wrong("counts", "does not count the traffic of one client")
        up = (traffic.UP_PARAMETERS, traffic.UP_BYTES, traffic.BUFFER_BYTES)
        if any(counts[place] > most for place in up):
            fields.wrong("counts", f"says that more than {most} bytes were sent")
        return counts

    def _update(self, fields: Fields, home: ClientResult) -> None:
        w = self.round.w
        if self.holds:
            home.holds = self._mask(fields, "holds").to(w.device)
        where = round_messages.travelling(self.round, home)
        codes = fields.under("code")
        if self.decode is not None:
            home.update = self._decoded(codes, home.client).to(w.device)
            return
        codes.end()
        shape = (self.size if where is None else int(where.sum()),)
        part = fields.tensor("update", [shape], w.dtype, most=MOST)
        home.update = round_messages.spread(part, (self.size,), where).to(w.device)

    def _mask(self, fields: Fields, name: str) -> Tensor:
        try:
            return round_messages.got_mask(fields.array(name, "u"), self.size)
        except ValueError as error:
            fields.wrong(name, f"is not a mask of {self.size} coordinates ({error})")

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
            codes.wrong("…", f"is not what the method's decode accepts ({_said(error)})")
        if not update.is_floating_point() or not finite(update.to(self.round.w.dtype), MOST):
            codes.wrong("…", "stands for numbers that are not finite", finite=False)
        return update

    def _uploads(self, fields: Fields, home: ClientResult) -> None:
        came = fields.under("upload")
        absent = fields.under("absent")
        w = self.round.w
        where = round_messages.travelling(self.round, home)
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

    def _withheld(self, fields: Fields, client: int) -> bool:
        """Return whether the client's logs and metrics stay at its site, as the site declared."""
        fewest = self.fewest.get(client, 0)
        samples = self.round.sizes[client]
        withheld = fields.optional("withheld", 1, 1) is not None
        # A site may also withhold the values of a round whose steps read fewer samples.
        if withheld and fewest <= 1:
            fields.wrong("withheld", f"is 1, and the site declared fewest_samples={fewest}")
        if not withheld and samples < fewest:
            fields.wrong(
                "withheld",
                f"is missing, and the site declared fewest_samples={fewest} for {samples} samples",
            )
        return withheld

    def _logs(self, fields: Fields) -> dict[str, Tensor]:
        logs = {}
        for name in [*fields.numbers]:
            # A learner may log NaN or infinity: then the mean is that of the other clients.
            number = fields.number(name)
            if self._counts_as(fields, name) and self._fits(fields, name, number):
                logs[name] = torch.tensor(number, dtype=torch.float64, device=self.round.w.device)
        fields.end()
        return logs

    def _counts_as(self, fields: Fields, name: str) -> bool:
        """Return whether a metric's name is a client's; otherwise the server's value counts.

        Raises:
            WrongField: only the server measures under such a name.
        """
        check_name(fields, "", name)
        if name.startswith(OF_SERVER):
            fields.wrong(name, "has the name of a metric that only the server measures")
        reserved = name in RESERVED or name.startswith("lr-")
        if reserved:
            self.left.append((fields.within + name, "this name is the server's"))
        # The learner may log a name in validation, too.
        return not reserved and name not in self.measured

    def _fits(self, fields: Fields, name: str, value: float) -> bool:
        if abs(value) <= MOST:  # NaN is in no order
            return True
        self.left.append((fields.within + name, UNFIT))
        return False

    def _metric_states(self, fields: Fields) -> MetricStates:
        found = MetricStates()
        updates = fields.under("updates")
        states = fields.under("state")
        items = fields.under("items")
        places = {str(j): j for j in range(len(self.metrics))}
        for word in [*updates.numbers]:
            if word not in places:
                updates.wrong(word, "is not the place of a metric of the learner")
            count = updates.integer(word, 1, 2**40)
            j = places[word]
            here = states.under(word), items.under(word)
            found.states[j] = count, self._states(*here, j, self.metrics[j])
        for left in (updates, states, items):
            left.end()
        names = fields.under("name")
        for name in [*names.numbers]:
            j = names.integer(name, 0, len(self.metrics))
            if j not in found.states:
                names.wrong(name, "is the name of a metric whose states are not there")
            if self._counts_as(names, name):
                found.names[name] = j
        names.end()
        own = fields.under("alone")
        for name in own.tensors():
            array = own.array(name, "f")
            if array.shape != () or array.dtype != "float64":
                own.wrong(name, "is not a number in double precision")
            value = float(array)
            if self._counts_as(own, name) and self._fits(own, name, value):
                found.alone[name] = torch.tensor(value, dtype=torch.float64)
        own.end()
        return found

    def _states(self, fields: Fields, items: Fields, j: int, metric: Metric) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, default in metric._defaults.items():
            if isinstance(default, list):
                # A site sends no list, because it would hold values of single samples.
                items.integer(name, 0, 0)
                values[name] = []
                continue
            values[name] = self._state(fields, j, name, default, metric._reductions[name])
        items.end()
        fields.end()
        return values

    def _state(self, fields: Fields, j: int, name: str, default: Tensor, reduction: Any) -> Tensor:
        shape = tuple(default.shape)
        shapes = [self.known.shapes.get((j, name), shape)]
        array = fields.arrays.get(name)
        # A state that begins as one number may get an axis at the first update. If the server's
        # own step did not update it, the clients have to agree: see `disputed`.
        free = not shape and (j, name) not in self.known.shapes
        if array is not None and free and array.size <= 2**16:
            shapes.append(array.shape)
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


def _numel(state: Any) -> int:
    return state.numel() if isinstance(state, Tensor) else 0


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:100]}"
