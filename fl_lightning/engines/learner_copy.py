"""A learner whose trainable parameters are views into one client's vector, and the gradient of its
loss.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from fl_lightning.aggregation import metric_states
from fl_lightning.aggregation.metric_states import MetricStates, outside
from fl_lightning.engines.client_trainer import Present, nobody
from fl_lightning.engines.step_hooks import StepHooks, differentiated
from fl_lightning.engines.step_logs import LAST, StepLogs
from fl_lightning.learner import (
    IN_STEPS,
    Layout,
    buffer_slots,
    check_trainable,
    fill,
    lent_logs,
    lightning_modules,
    logged_of,
    tie,
    trainable,
    without_graphs,
)
from fl_lightning.lightning import LightningOptimizer
from fl_lightning.parameters import slots_of_parameters
from fl_lightning.round.clients import LOSS
from fl_lightning.round.context import Round

Convert = Callable[[Any, Any], Any]


class LearnerCopy:
    """The learner at ``x`` ``(1, D)``: ``gradient(batch)`` there, and what the learner logs
    meanwhile.

    Args:
        learner: any LightningModule; its parameters are tied to ``x`` by :meth:`tied` or
            :meth:`attach`.
        forward_context: around each forward pass: gradients on, and autocast where asked for.
        convert: ``(learner, batch) -> batch``, by the learner's transfer hooks and the precision;
            None: unchanged.
    """

    def __init__(
        self,
        learner: Any,
        layout: Layout,
        x: Tensor,
        forward_context: Callable[[], AbstractContextManager[Any]] = torch.enable_grad,
        convert: Convert | None = None,
    ) -> None:
        self.learner = learner
        self.layout = layout
        self.x = x
        self.g = torch.zeros_like(x)
        self._views_of_g = layout.views(self.g.view(-1))
        self._views = layout.views(x.view(-1))
        self._second: tuple[Tensor, list[Tensor]] | None = None
        self._third: tuple[Tensor, ...] | None = None
        self.parameters = [p for _, p in trainable(learner)]
        self._slots, self._own_buffers = buffer_slots(learner)
        self.slots_of_parameters = slots_of_parameters(learner)
        # frozen parameters, and where they lie
        self._written: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self.forward_context = forward_context
        self.convert = convert
        self.step: Callable[..., Any] = learner.training_step
        accepted = inspect.signature(self.step).parameters
        self.takes_index = "batch_idx" in accepted or len(accepted) > 1
        self.logging = self.keeps_loss = False
        self.logged: dict[str, list[Tensor]] = {}  # of the present step
        self.logs = StepLogs(learner, x.device)  # over steps
        self.sums = self.logs.totals
        self.numbers = self.logs.numbers
        # whether what is logged by step and by epoch gets names of its own, as in training
        self.forks = True
        self.per_parameter = self.gradients
        self.metrics = [m for m in learner.modules() if isinstance(m, (Metric, MetricCollection))]
        self._own_metrics = metric_states.metrics_of(learner)
        self._outside = [outside(metric) for metric in self._own_metrics]
        self._places = {id(metric): j for j, metric in enumerate(self._own_metrics)}
        self._logged_metrics: dict[str, int] = {}  # by name: which
        self._said = logged_of(learner)
        # the clients', over this learner's parameters, to look at
        self.optimizer: Optimizer | None = None
        self.scheduler: Any = None
        self.present = Present()
        # looked up once a round: a walk over all modules takes its time
        self._parts = lightning_modules(learner)
        self.hooks = StepHooks.of(learner, self.parameters, layout, lambda: self.optimizer)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The learner's buffers as they are now: ``training_step`` may assign a new tensor to one."""
        now = {
            name: places[0][0]._buffers.get(places[0][1]) for name, places in self._slots.items()
        }
        written = {name: parameter.data for name, (parameter, _) in self._written.items()}
        return {name: buffer for name, buffer in now.items() if buffer is not None} | written

    @property
    def written(self) -> Collection[str]:
        """Frozen parameters that are buffers to the run, by name."""
        return self._written.keys()

    def treat_as_buffers(self, names: Iterable[str]) -> None:
        """From here on these frozen parameters, which the learner's steps write, are its buffers
        too.
        """
        named = dict(self.learner.named_parameters())
        self._written = {name: (named[name], named[name].data) for name in names}

    def another(self, aliased: bool = True) -> LearnerCopy:
        """One with its own copy of the learner and its own x, for another thread.

        ``aliased``: frozen parameters that are not written, and plain tensors, stay the learner's.
        """
        learner = self.learner
        memo: dict[int, Any] = {}
        for parameter in learner.parameters() if aliased else ():
            if type(parameter) is nn.Parameter and not parameter.requires_grad:
                memo[id(parameter)] = nn.Parameter(parameter.data, requires_grad=False)
        for parameter, _ in self._written.values():
            memo.pop(id(parameter), None)
        trainers = [part._trainer for part in lightning_modules(learner)]
        memo.update(
            {id(trainer): trainer for trainer in trainers}
            | without_graphs(learner)
            | lent_logs(learner)
        )
        copied = copy.deepcopy(learner, memo)
        another = LearnerCopy(
            copied, self.layout, torch.empty_like(self.x), self.forward_context, self.convert
        )
        another.treat_as_buffers(self._written)
        another.keeps_loss = self.keeps_loss
        another.attach()
        if aliased:
            another.follow(learner)
        for part, trainer in zip(lightning_modules(copied), trainers, strict=True):
            part._trainer = trainer
        return another

    def attach(self) -> None:
        """Make the learner's parameters views into x, and collect what it logs."""
        tie(self.parameters, self._views)
        own = (
            self._log,
            self._log_dict,
            self._optimizers,
            lambda: self.scheduler,
            self.present.loader,
        )
        self._parts = lightning_modules(self.learner)
        for part in self._parts:
            for name, shim in zip(IN_STEPS, own, strict=True):
                object.__setattr__(part, name, shim)

    def begin(self, data: Any, who: Callable[[], int] = nobody, steps: int | None = None) -> None:
        """From here on the learner finds this client's numbers at its Trainer; see
        :class:`Present`.
        """
        self.present.begin(data, who, steps)
        for part in self._parts:
            object.__setattr__(part, "_trainer", self.present.trainer(part._trainer))

    @contextmanager
    def shifted(self, e: Tensor) -> Iterator[None]:
        """Within, the learner's parameters are at x + e, in the storage of g, and gradients go
        elsewhere.
        """
        if self._second is None:
            second = torch.empty_like(self.g)
            self._second = second, self.layout.views(second.view(-1))
        first = self.g, self._views_of_g
        torch.add(self.x, e, out=self.g)
        tie(self.parameters, self._views_of_g)
        self.g, self._views_of_g = self._second
        try:
            yield
        finally:
            tie(self.parameters, self._views)
            self.g, self._views_of_g = first

    @contextmanager
    def at(self, point: Tensor) -> Iterator[None]:
        """Within, the learner is at ``point``, and gradients go elsewhere; both in memory of their
        own.
        """
        if self._third is None:
            self._third = torch.empty_like(self.x), torch.empty_like(self.g)
        (x, g) = self._third
        held = (self.g, self._views_of_g)
        x.copy_(point)
        tie(self.parameters, self.layout.views(x.view(-1)))
        self.g = g
        self._views_of_g = self.layout.views(g.view(-1))
        try:
            yield
        finally:
            tie(self.parameters, self._views)
            self.g, self._views_of_g = held

    @contextmanager
    def tied(self, rest: Tensor) -> Iterator[None]:
        """Within, the learner is attached; afterwards its parameters are views into ``rest`` again."""
        check_trainable(self.learner, self.layout)
        parts = lightning_modules(self.learner)
        before = [
            (part, {n: vars(part)[n] for n in ("_trainer", *IN_STEPS) if n in vars(part)})
            for part in parts
        ]
        self.attach()
        try:
            yield
        finally:
            for part, shims in before:
                for name in IN_STEPS:
                    part.__dict__.pop(name, None)
                part.__dict__.update(shims)
            tie(self.parameters, self.layout.views(rest))
            self.reset()

    def reset(self) -> None:
        """Forget what was logged and what the learner's metrics gathered."""
        self.logged = {}
        self._logged_metrics = {}
        self.logs.clear()
        for metric in self.metrics:
            metric.reset()
        self._outside = [outside(metric) for metric in self._own_metrics]

    def follow(self, learner: nn.Module) -> None:
        """Take over attributes, modes and frozen parameters that the learner's hooks may have
        changed since.
        """
        check_trainable(learner, self.layout)
        written = {id(parameter) for parameter, _ in self._written.values()}
        for theirs, own in zip(learner.modules(), self.learner.modules(), strict=True):
            if isinstance(own, (Metric, MetricCollection)):
                continue
            for name, value in theirs.__dict__.items():
                if name == "_trainer" or (name not in IN_STEPS and _carries_over(value)):
                    if name == "_trainer":
                        own.__dict__[name] = value
                    else:
                        own.__dict__[name] = copy.deepcopy(value)
                elif isinstance(value, Tensor):
                    own.__dict__[name] = value.detach()
            for name, parameter in theirs._parameters.items():
                twin = own._parameters.get(name)
                if parameter is None or twin is None or parameter.requires_grad:
                    continue
                if id(twin) not in written:
                    twin.data = parameter.data

    def gradients(self, batch: Any, step: int, log: bool = True) -> tuple[Tensor, ...]:
        """∇ℓ(x; batch), one tensor a parameter; zeros where there is none."""
        if log or not self._own_metrics:
            return self._gradients(batch, step, log)
        with metric_states.kept(self._own_metrics):
            return self._gradients(batch, step, log)

    def loss(self, batch: Any, step: int) -> tuple[Any, Tensor]:
        """What ``training_step`` returns for a batch that is converted already, and the loss in it."""
        with self.forward_context():
            output = self.step(batch, step) if self.takes_index else self.step(batch)
        loss = output["loss"] if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            raise TypeError(
                f"{type(self.learner).__name__}.training_step returned {type(output).__name__}; "
                "it has to return the loss, a scalar tensor, or a dict with 'loss'. A step "
                "cannot be skipped: where there is nothing to learn from, return a zero loss (0 "
                "* loss)"
            )
        return output, loss

    def _gradients(self, batch: Any, step: int, log: bool) -> tuple[Tensor, ...]:
        self.logging = log
        self.present.index = step
        if self.convert is not None:
            batch = self.convert(self.learner, batch)
        if log and self.hooks is not None:
            self.hooks.batch_start(batch, step)
        output, loss = self.loss(batch, step)
        if self.hooks is None:
            gradients = differentiated(loss, self.parameters)
        else:
            gradients = tuple(self.hooks.backward(loss, first=log))
            if log:
                self.hooks.batch_done(output, loss, batch, step)
        if log and self.keeps_loss:
            self.logged[LOSS] = [loss.detach()]
        self._flush()
        self.logging = True  # hooks after the gradient log, whatever it was for
        return gradients

    def _flush(self) -> None:
        for name, values in self.logged.items():
            self.logs.add(name, values)
        self.logged.clear()

    def gradient(self, batch: Any, step: int, log: bool = True) -> Tensor:
        """∇ℓ(x; batch) ``(1, D)``. The next call reuses the returned storage."""
        fill(self._views_of_g, self.gradients(batch, step, log))
        return self.g

    def take_metrics(self) -> MetricStates | None:
        """What the steps since the last reset left in the learner's metrics; None where it has
        none.
        """
        if not self._own_metrics:
            return None
        return metric_states.taken(
            self.learner, self._own_metrics, dict(self._logged_metrics), self._outside
        )

    def take_logs(self) -> dict[str, Tensor]:
        """Numbers over the steps since the last call, float64 scalars; metrics are apart."""
        self._flush()  # of hooks after the last gradient
        self.logged = {}
        self._logged_metrics = {}
        return self.logs.take()

    def load(self, round: Round, client: int) -> None:
        """To the server's model, and the buffers that a client starts from."""
        self.x.copy_(round.w)
        self.load_buffers(round.buffers_of(client))

    def load_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Copy values into the buffer tensors that the learner had at first, and put those back in
        their places.
        """
        for name, places in self._slots.items():
            own = self._own_buffers[name]
            value = values.get(name)
            # a hook replaced it between rounds
            if own is None or value is None or own.shape != value.shape:
                own = None if value is None else value.clone()
            else:
                own.copy_(value)
            for module, leaf in places:
                module._buffers[leaf] = own
        for name, (parameter, data) in self._written.items():
            data.copy_(values[name])
            parameter.data = data  # to which the learner may have assigned

    def _log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        **others: Any,
    ) -> None:
        if not self.logging:
            return
        self._said.note(name, value, prog_bar)
        forked = self.forks and on_epoch and on_step is not False
        if isinstance(value, Metric):
            if id(value) in self._places:
                for each in (name, name + "_epoch") if forked else (name,):
                    self._logged_metrics[each] = self._places[id(value)]
                if forked and value._forward_cache is not None:
                    self._put(name + "_step", value._forward_cache, LAST)
                return
            if value._forward_cache is None:
                value = value.compute()
            else:
                value = value._forward_cache
        self._put(name, value, reduce_fx)
        if forked:
            self._put(name + "_epoch", value, reduce_fx)
            self._put(name + "_step", value, LAST)

    def _put(self, name: str, value: Any, reduce_fx: Any) -> None:
        if not isinstance(value, Tensor):
            value = torch.tensor(float(value), device=self.x.device)
        self.logs.declare(name, reduce_fx)
        self.logged.setdefault(name, []).append(value.detach())

    def _optimizers(self, use_pl_optimizer: bool = True) -> Any:
        if use_pl_optimizer and self.optimizer is not None:
            return LightningOptimizer(self.optimizer)
        return self.optimizer

    def _log_dict(self, dictionary: Any, *args: Any, **flags: Any) -> None:
        if isinstance(dictionary, MetricCollection):
            items = dictionary.items(keep_base=False)
        else:
            items = dictionary.items()
        for name, value in items:
            self._log(name, value, *args, **flags)


def _carries_over(value: object) -> bool:
    """Whether an attribute is plain data, which a copy of the learner can take over by value."""
    if isinstance(value, (list, tuple, set)):
        return all(_carries_over(v) for v in value)
    if isinstance(value, dict):
        return all(_carries_over(k) and _carries_over(v) for k, v in value.items())
    return value is None or type(value) in (bool, int, float, complex, str, bytes)
