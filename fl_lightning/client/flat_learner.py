"""A learner whose trainable parameters are views into a client's vector, and its loss gradient."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torchmetrics import Metric, MetricCollection

from fl_lightning.aggregation import metric_states
from fl_lightning.aggregation.metric_states import MetricStates, outside
from fl_lightning.client.copy_sync import Objects, at, take_over
from fl_lightning.client.gradient_accumulation import StepBatches, count_of
from fl_lightning.client.linear_factors import LinearLayer
from fl_lightning.client.step_hooks import StepHooks, dense, differentiated
from fl_lightning.client.step_logs import LAST, StepLogs, items_of
from fl_lightning.client.trainer_view import ClientProgress, nobody
from fl_lightning.errors import UserError, WrongKind
from fl_lightning.learner.buffers import buffer_slots
from fl_lightning.learner.layout import Layout, check_trainable, fill, tie, trainable
from fl_lightning.learner.modules import (
    REPLACED_IN_STEPS,
    called_with,
    check_loggable,
    deep_copied,
    lent_logs,
    lightning_modules,
    logged_of,
)
from fl_lightning.learner.parameters import slots_of_parameters
from fl_lightning.machine.lightning import LightningOptimizer
from fl_lightning.round.client_group import LOSS
from fl_lightning.round.context import Round

Convert = Callable[[Any, Any], Any]


class FlatLearner:
    """The learner at ``x`` ``(1, D)``: ``gradient(batch)`` there, and its logs meanwhile.

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
        # The point of another gradient of a step, of a gradient there, and of a pass between a loss
        # and its gradient: vectors of their own, with their views, once they were needed.
        self._vectors: dict[str, tuple[Tensor, list[Tensor]]] = {}
        self.sample_memory: Tensor | None = None  # for the gradients of single samples (b, R)
        self.factored: list[LinearLayer] | None = None  # of their gradients; None: not known yet
        self._buffers_aside: dict[str, Tensor] = {}
        self._objects: Objects | None = None  # of the learner that this is a copy of
        self.forward_hooks: Any = None  # ForwardHooks, where methods look at passes
        self._count: Tensor | None = None  # the weight of the latest batch in an accumulated step
        self.parameters = [p for _, p in trainable(learner)]
        # Places of the parameters that the clients' optimizer does not hold: they have no gradient.
        self.unheld: frozenset[int] = frozenset()
        # Places of the parameters that got no gradient from the latest loss: torch's optimizers do
        # not step these.
        self.missing: Sequence[int] = ()
        self._slots, self._own_buffers = buffer_slots(learner)
        self.slots_of_parameters = slots_of_parameters(learner.named_modules())
        # Steps may assign new data to a frozen parameter that they write, so its first memory is
        # kept too.
        self._as_buffers: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self.forward_context = forward_context
        self.convert = convert
        self.step: Callable[..., Any] = learner.training_step
        self.takes_index = len(called_with(self.step, None, 0)) > 1
        self.logging = self.keeps_loss = False
        self.recording = False  # the present step is recorded, and will be replayed
        self.logged: dict[str, list[Tensor]] = {}  # of the present step
        self.logs = StepLogs(learner, x.device)  # over steps
        self.numbers = self.logs.numbers
        # In training, a value that is logged by step and by epoch gets a name for each, and
        # `on_epoch` is False if it is not given.
        self.forks = True
        self.per_parameter = self.gradients
        self._find_metrics()
        # Logged name → the metric's index in _own_metrics.
        self._logged_metrics: dict[str, int] = {}
        self._told_of_metrics = logged_of(learner)
        # Only for the learner's hooks to read: the clients' optimizer over this learner's
        # parameters, and its scheduler.
        self.optimizer: Optimizer | None = None
        self.scheduler: Any = None
        self.present = ClientProgress()
        # Walking over all modules is slow, so it is done once per round, and not once per client.
        self._parts = lightning_modules(learner)
        self.hooks = StepHooks.of(learner, self.parameters, layout, lambda: self.optimizer)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The learner's buffers as they are now."""
        buffers: dict[str, Tensor] = {}
        # Look each buffer up in its module, because `training_step` may assign a new tensor to it.
        for name, places in self._slots.items():
            module, leaf = places[0]
            buffer = at(module._buffers, leaf)
            if buffer is not None:
                buffers[name] = buffer
        for name, (parameter, _) in self._as_buffers.items():
            buffers[name] = parameter.data
        return buffers

    @property
    def as_buffers(self) -> Collection[str]:
        """Frozen parameters that are buffers to the run, by name."""
        return self._as_buffers.keys()

    def treat_as_buffers(self, names: Iterable[str]) -> None:
        """Count frozen parameters, which the learner's steps write, among its buffers."""
        parameters = dict(self.learner.named_parameters())
        self._as_buffers = {name: (parameters[name], parameters[name].data) for name in names}

    def another(self, aliased: bool = True) -> FlatLearner:
        """One with its own copy of the learner and its own x, for another thread.

        ``aliased``: frozen parameters that are no buffers, and plain tensors, stay the learner's.
        """
        learner = self.learner
        # deepcopy does not copy the objects in its memo: all workers share the frozen weights, the
        # Trainer belongs to the run, and `attach` restores this copy's shims below.
        memo: dict[int, Any] = {}
        for parameter in learner.parameters() if aliased else ():
            if type(parameter) is nn.Parameter and not parameter.requires_grad:
                memo[id(parameter)] = nn.Parameter(parameter.data, requires_grad=False)
        for parameter, _ in self._as_buffers.values():
            memo.pop(id(parameter), None)
        trainers = [part._trainer for part in lightning_modules(learner)]
        memo |= {id(trainer): trainer for trainer in trainers}
        memo |= lent_logs(learner)
        for part in lightning_modules(learner):
            shims = [vars(part)[name] for name in REPLACED_IN_STEPS if name in vars(part)]
            memo |= {id(shim): shim for shim in shims}
        copied = deep_copied(learner, memo)
        another = FlatLearner(
            copied, self.layout, torch.empty_like(self.x), self.forward_context, self.convert
        )
        another.treat_as_buffers(self._as_buffers)
        another.keeps_loss = self.keeps_loss
        another.unheld = self.unheld
        another.present.silent = self.present.silent
        another.present.measures = self.present.measures
        another.attach()
        another._objects = Objects(learner)
        if aliased:
            another.follow(learner)
        for part, trainer in zip(lightning_modules(copied), trainers, strict=True):
            part._trainer = trainer
        return another

    def _find_metrics(self) -> None:
        learner = self.learner
        self.metrics = [m for m in learner.modules() if isinstance(m, (Metric, MetricCollection))]
        self._own_metrics = metric_states.metrics_of(learner)
        self._metric_attributes = [outside(metric) for metric in self._own_metrics]
        self._metric_index = {id(metric): j for j, metric in enumerate(self._own_metrics)}

    def attach(self) -> None:
        """Make the learner's parameters views into x, and collect what it logs."""
        # Hooks may have added metrics, as a MetricTracker does.
        self._find_metrics()
        tie(self.parameters, self._views)
        shims = {
            "log": self._log,
            "log_dict": self._log_dict,
            "optimizers": self._optimizers,
            "lr_schedulers": lambda: self.scheduler,
            "train_dataloader": self.present.loader,
        }
        self._parts = lightning_modules(self.learner)
        for part in self._parts:
            for name, shim in shims.items():
                object.__setattr__(part, name, shim)

    def begin(self, data: Any, who: Callable[[], int] = nobody, steps: int | None = None) -> None:
        """Let the learner find this client's numbers at its Trainer: :class:`ClientProgress`."""
        self.present.begin(data, who, steps)
        for part in self._parts:
            object.__setattr__(part, "_trainer", self.present.trainer(part._trainer))

    def go_to(self, x: Tensor) -> None:
        """Put the learner at x ``(D,)``, also where its hooks gave parameters other data."""
        tie(self.parameters, self._views)
        with torch.no_grad():
            self.x.copy_(x.detach().view(1, -1))

    def vector(self, name: str) -> tuple[Tensor, list[Tensor]]:
        """A vector ``(1, D)`` besides x and g, and its views."""
        if name not in self._vectors:
            vector = torch.empty_like(self.x)
            self._vectors[name] = vector, self.layout.views(vector.view(-1))
        return self._vectors[name]

    def shifted(self, e: Tensor) -> AbstractContextManager[None]:
        """Within, the learner's parameters are at x + e, and gradients go to a second vector."""
        torch.add(self.x, e, out=self.vector("point")[0])
        return self._elsewhere("second gradient")

    def at(self, point: Tensor) -> AbstractContextManager[None]:
        """Within, the learner is at ``point``, and gradients go to a third vector."""
        self.vector("point")[0].copy_(point)
        return self._elsewhere("third gradient")

    @contextmanager
    def _elsewhere(self, gradient: str) -> Iterator[None]:
        first = (self.g, self._views_of_g)
        tie(self.parameters, self.vector("point")[1])
        self.g, self._views_of_g = self.vector(gradient)
        try:
            yield
        finally:
            tie(self.parameters, self._views)
            self.g, self._views_of_g = first

    @contextmanager
    def aside(
        self, point: Tensor, buffers: Mapping[str, Tensor], training: bool
    ) -> Iterator[set[int]]:
        """Within, the learner is at ``point`` with ``buffers``, without logs.

        It is in evaluation mode, unless ``training``. All that a pass has saved for its gradient
        stays as it is: the point and buffers have memory of their own, whose addresses are given.
        """
        x, views = self.vector("aside")
        x.copy_(point)
        found = [parameter.data for parameter in self.parameters]
        written = [parameter.data for parameter, _ in self._as_buffers.values()]
        replaced = self._replace_buffers(buffers)
        switched = [] if training else [part for part in self.learner.modules() if part.training]
        logging = self.logging
        self.logging = False
        try:
            tie(self.parameters, views)
            for part in switched:
                part.training = False
            with self.metrics_kept():
                yield {each.untyped_storage().data_ptr() for each in [x, *self.buffers.values()]}
        finally:
            self.logging = logging
            for part in switched:
                part.training = True
            for module, leaf, buffer in replaced:
                module._buffers[leaf] = buffer
            for (parameter, _), data in zip(self._as_buffers.values(), written, strict=True):
                parameter.data = data
            tie(self.parameters, found)

    def _replace_buffers(
        self, values: Mapping[str, Tensor]
    ) -> list[tuple[nn.Module, str, Tensor | None]]:
        """Give the learner copies of ``values``.

        Returns:
            (module, name, the tensor that it had) of each buffer.
        """
        replaced = []
        for name, places in self._slots.items():
            buffer = self._buffer_aside(name, values)
            for module, leaf in places:
                replaced.append((module, leaf, at(module._buffers, leaf)))
                module._buffers[leaf] = buffer
        for name, (parameter, _) in self._as_buffers.items():
            data = self._buffer_aside(name, values)
            assert data is not None
            parameter.data = data
        return replaced

    def _buffer_aside(self, name: str, values: Mapping[str, Tensor]) -> Tensor | None:
        value = values.get(name)
        if value is None:
            return None
        own = self._buffers_aside.get(name)
        if own is None or own.shape != value.shape:
            own = self._buffers_aside[name] = torch.empty_like(value)
        return own.copy_(value)

    @contextmanager
    def tied(self, rest: Tensor) -> Iterator[None]:
        """Within, the learner is attached; afterwards its parameters are views into ``rest``.

        Its metrics are then as they were, so that those of its validation go on over rounds.
        """
        check_trainable(self.learner, self.layout)
        names = ("_trainer", *REPLACED_IN_STEPS)
        own_attributes = []
        for part in lightning_modules(self.learner):
            own_attributes.append((part, {n: vars(part)[n] for n in names if n in vars(part)}))
        self.attach()
        with self.metrics_kept():
            try:
                yield
            finally:
                # An attribute that the module did not have before is deleted: it would hide the
                # class's.
                for part, attributes in own_attributes:
                    for name in REPLACED_IN_STEPS:
                        part.__dict__.pop(name, None)
                    part.__dict__.update(attributes)
                tie(self.parameters, self.layout.views(rest))
                self.reset()

    def reset(self) -> None:
        """Clear the logged values and the states of the learner's metrics."""
        self.logged = {}
        self._logged_metrics = {}
        self.logs.clear()
        for metric in self.metrics:
            metric.reset()
        self._metric_attributes = [outside(metric) for metric in self._own_metrics]

    def follow(self, learner: nn.Module) -> None:
        """Take over what the learner's hooks may have changed since.

        That is attributes, modes, modules without trainable parameters, and frozen parameters.
        """
        check_trainable(learner, self.layout)
        assert self._objects is not None, "only a copy follows"
        twins = take_over(learner, self.learner, self._objects)
        self._find_metrics()
        written = {id(parameter) for parameter, _ in self._as_buffers.values()}
        for theirs in learner.modules():
            own = twins[id(theirs)]
            if isinstance(own, (Metric, MetricCollection)):
                continue
            for name, parameter in theirs._parameters.items():
                twin = at(own._parameters, name)
                if parameter is None or twin is None or parameter.requires_grad:
                    continue
                if id(twin) not in written:
                    twin.data = parameter.data

    def gradients(self, batch: Any, step: int, log: bool = True) -> tuple[Tensor, ...]:
        """∇ℓ(x; batch), one tensor per parameter; zeros if it has no gradient."""
        of = self._accumulated if isinstance(batch, StepBatches) else self._gradients
        if log or not self._own_metrics:
            return of(batch, step, log)
        with self.metrics_kept():
            return of(batch, step, log)

    def _accumulated(self, batches: StepBatches, step: int, log: bool) -> tuple[Tensor, ...]:
        """The mean of the batches' gradients, weighed by what each counts."""
        missing = set(range(len(self.parameters)))
        totals: list[Tensor] = []
        counts: list[Tensor] = []
        for place, batch in enumerate(batches.batches):
            if place and log and self.hooks is not None:
                self.hooks.batch_end(self.missing)
            gradients = self._gradients(batch, batches.first + place, log, place)
            assert self._count is not None
            counts.append(self._count)
            if not totals:
                totals = [g * self._count for g in gradients]
            else:
                for total, g in zip(totals, gradients, strict=True):
                    total.add_(g * self._count)
            missing &= set(self.missing)
        self.missing = sorted(missing)
        self.logs.step_done()
        number = torch.stack(counts).sum()
        # If no batch has anything that counts, the gradient is zero, as in a large batch.
        number = number + (number == 0)
        return tuple(total.div_(number) for total in totals)

    def metrics_kept(self) -> AbstractContextManager[None]:
        """Within it steps leave the learner's metrics as they were."""
        return metric_states.kept(self._own_metrics)

    def loss(self, batch: Any, step: int) -> tuple[Any, Tensor]:
        """The output of ``training_step`` for a converted batch, and the loss in it."""
        with self.forward_context():
            output = self.take_step(batch, step)
        return output, self.loss_in(output)

    def loss_in(self, output: Any) -> Tensor:
        """The loss in what ``training_step`` returned.

        Raises:
            WrongKind: it lacks a loss of one number.
        """
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = type(output).__name__
            if isinstance(loss, Tensor):
                kind = f"a loss of shape {tuple(loss.shape)}"
            raise WrongKind(
                f"{type(self.learner).__name__}.training_step returned {kind}; it has to return "
                "the loss, a scalar tensor, or a dict with 'loss'. A step cannot be skipped: if a "
                "batch has nothing to learn from, return a zero loss (0 * loss)"
            )
        return loss

    def take_step(self, batch: Any, step: Any) -> Any:
        """The output of ``training_step``, as it is."""
        return self.step(batch, step) if self.takes_index else self.step(batch)

    def _gradients(
        self, batch: Any, step: int, log: bool, place: int | None = None
    ) -> tuple[Tensor, ...]:
        """``place``: of the batch in its step; None: it is the step's only one."""
        self.logging = log
        self.present.index = step
        if self.convert is not None:
            batch = self.convert(self.learner, batch)
        if log and self.hooks is not None:
            self.hooks.batch_start(batch, step)
        if self.forward_hooks is None:
            output, loss = self.loss(batch, step)
            minimised = loss
        else:
            output, loss, minimised = self.forward_hooks.loss(batch, step, place or 0)
        if self.hooks is None:
            gradients = differentiated(minimised, self.parameters, self.recording)
        else:
            gradients = self.hooks.backward(minimised, first=log and not place)
            if log:
                self.hooks.batch_done(output, loss, batch, step)
        if log and self.keeps_loss:
            self.logged[LOSS] = [loss.detach()]
        if place is not None:
            name = type(self.learner).__name__
            self._count = self.logs.count = count_of(name, output, batch, self.x.device)
        self._flush()
        # With log=False the step itself logs nothing, but hooks that come after it may.
        self.logging = True
        if self.unheld:
            gradients = tuple(None if j in self.unheld else g for j, g in enumerate(gradients))
        self.missing = [j for j, g in enumerate(gradients) if g is None]
        return dense(gradients, self.parameters)

    def _flush(self) -> None:
        for name, values in self.logged.items():
            self.logs.add(name, values)
        self.logged.clear()

    def gradient(self, batch: Any, step: int, log: bool = True) -> Tensor:
        """∇ℓ(x; batch) ``(1, D)``. The next call reuses the returned storage."""
        fill(self._views_of_g, self.gradients(batch, step, log))
        return self.g

    def take_metrics(self) -> MetricStates | None:
        """States of the learner's metrics since the last reset; None where it has no metrics."""
        if not self._own_metrics:
            return None
        return metric_states.taken(
            self.learner, self._own_metrics, dict(self._logged_metrics), self._metric_attributes
        )

    def take_logs(self) -> dict[str, Tensor]:
        """Numbers over the steps since the last call, float64 scalars; metrics are apart."""
        # Hooks may have logged after the last gradient, when the step's logs had already been
        # taken.
        self._flush()
        self.logged = {}
        self._logged_metrics = {}
        return self.logs.take()

    def load(self, round: Round, client: int) -> None:
        """Load the server's model, and the buffers that the client starts from."""
        self.x.copy_(round.w)
        self.load_buffers(round.buffers_of(client))

    def load_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Copy values into the buffer tensors that the learner had at first.

        These tensors come back to their places, where a step assigned others: a recorded step
        reads and writes them.
        """
        for name, places in self._slots.items():
            buffer = self._own_buffers[name]
            value = values.get(name)
            if value is None:
                buffer = None
            elif buffer is None or buffer.shape != value.shape:
                # A hook assigned another buffer to the learner between rounds.
                buffer = value.clone()
            else:
                buffer.copy_(value)
            for module, leaf in places:
                module._buffers[leaf] = buffer
        for name, (parameter, data) in self._as_buffers.items():
            data.copy_(values[name])
            # The learner may have assigned other data to the parameter.
            parameter.data = data

    def _log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        # Unused, but named, so that a misspelt argument is Python's TypeError, as in Lightning.
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        if not self.logging:
            return
        check_loggable(type(self.learner).__name__, name, value)
        if on_step is False and not on_epoch and (self.forks or on_epoch is not None):
            raise UserError(
                f"learner {type(self.learner).__name__}: self.log({name!r}, on_step=False) asks "
                "for no value: in a training step on_epoch is False if it is not given. Add "
                "on_epoch=True."
            )
        self._told_of_metrics.note(name, value, prog_bar)
        forked = self.forks and on_epoch and on_step is not False
        if isinstance(value, Metric):
            # The learner's own metric is merged over clients, so store its index and not a number.
            if id(value) in self._metric_index:
                self._logged_metrics[name] = self._metric_index[id(value)]
                if forked:
                    self._logged_metrics[name + "_epoch"] = self._metric_index[id(value)]
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
            # Filling does not wait for the device, and copying a number to it would.
            value = torch.full((), float(value), device=self.x.device)
        self.logs.declare(name, reduce_fx)
        # The step may change what it has logged in place afterwards.
        self.logged.setdefault(name, []).append(value.detach().clone())

    def _optimizers(self, use_pl_optimizer: bool = True) -> Any:
        if use_pl_optimizer and self.optimizer is not None:
            return LightningOptimizer(self.optimizer)
        return self.optimizer

    def _log_dict(self, dictionary: Any, *args: Any, **flags: Any) -> None:
        for name, value in items_of(dictionary):
            self._log(name, value, *args, **flags)
