"""One local step, in which every kind of rule has its place; the same in every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fl_lightning.callback_list import (
    AFTER_CLIPPING,
    BEFORE_CLIPPING,
    CallbackList,
    checked_nothing,
    checked_rows,
)
from fl_lightning.client.client_optimizer import ClientOptimizer
from fl_lightning.client.gradient_accumulation import batches_in, by_step
from fl_lightning.client.sample_gradients import SampleGradients
from fl_lightning.errors import UserError
from fl_lightning.learner.taps import versions
from fl_lightning.machine.random_state import PassDraws, RandomState, drawn_again
from fl_lightning.round.client_group import ClientGroup
from fl_lightning.round.clients import Clients
from fl_lightning.round.context import Evaluate, Round


@dataclass
class LocalTraining:
    """Data, methods and settings of local training, the same in all rounds of a run.

    Args:
        data: gives each client's batches, by ``client_batches`` and ``full_batches``.
        seed: the run's.
        keep_optimizer_state: whether a client's optimizer goes on from its latest round.
        accumulate: batches of a local step.
        evaluate: behind ``clients.evaluate``.
        draws: whether learner or data may draw from the process's generators, which are then seeded
            for each client.
        samples_at_once: of the gradients of single samples, if a method takes these.
    """

    data: Any
    methods: CallbackList
    seed: int
    clip_norm: float | None = None
    keep_optimizer_state: bool = False
    accumulate: int = 1
    draws: bool = True
    evaluate: Evaluate | None = None
    samples_at_once: int | None = None

    def client_batches(
        self, client: int, round: int, steps: int, device: torch.device
    ) -> Iterator[Any]:
        """What a client's local steps take, as a method lets it see it.

        That is a batch of each step; with ``accumulate`` above 1, its ``StepBatches``. If a method
        chooses each step's samples, it is None for a step without any.
        """
        choose = self.methods.owner("step_samples")
        if choose is not None:
            positions = choose(client, round, steps)
            sampled: Iterator[Any] = self.data.sampled_batches(client, round, positions, device)
            return sampled
        number = self.batches_in(client, steps)
        batches: Iterator[Any] = self.data.client_batches(client, round, number, device=device)
        change = self.methods.owner("local_batch")
        if change is not None:
            batches = map(partial(change, client), batches)
        if self.accumulate == 1:
            return batches
        return by_step(batches, self.data.batches_per_epoch(client), self.accumulate)

    @property
    def counts_batches(self) -> bool:
        """Whether a local step counts as several gradients, one for each of its batches."""
        return self.accumulate > 1 and not self.methods.reduced_by

    def batches_in(self, client: int, steps: int) -> int:
        """The batches of so many local steps of a client."""
        if self.accumulate == 1 or self.methods.owner("step_samples") is not None:
            return steps
        return batches_in(steps, self.data.batches_per_epoch(client), self.accumulate)

    def full_batches(self, client: int, device: torch.device) -> Iterator[tuple[Any, int]]:
        """All of a client's samples in batches, as a method lets it see them, with their sizes."""
        batches: Iterator[tuple[Any, int]] = self.data.full_batches(client, device=device)
        change = self.methods.owner("local_batch")
        if change is None:
            return batches
        return ((change(client, batch), number) for batch, number in batches)

    def group(
        self,
        round: Round,
        ids: list[int],
        x: Tensor,
        full_gradient: Callable[[ClientGroup, Tensor], Tensor],
    ) -> ClientGroup:
        """Clients about to be trained, with models ``x`` ``(n, D)``."""
        group = ClientGroup(round, ids, x, full_gradient, self.evaluate)
        group.label_counts = self.label_counts
        group.measuring = self.methods.measuring
        group.models_of = self.methods.gives_models
        group.reduced_by = self.methods.reduced_by
        group.protected_by = self.methods.protects_samples
        return group

    def label_counts(self, client: int) -> list[int] | None:
        """A client's training samples by class, as a method lets it see them; None: no classes."""
        of_data = getattr(self.data, "client_label_counts", None)
        counts = None if of_data is None else of_data(client)
        if counts is None or self.methods.owner("local_batch") is None:
            return None if counts is None else [int(count) for count in counts]
        total = torch.zeros(len(counts), dtype=torch.int64)
        for batch, _ in self.full_batches(client, torch.device("cpu")):
            total += torch.bincount(batch[1].cpu(), minlength=len(counts))
        return total.tolist()


class LocalStep:
    """Takes the clients' model one step on: ``step(batch, index)``.

    Args:
        model: one client's copy of the learner (``FlatLearner``), several clients' (``Stack``), or
            a rehearsal's. ``gradient(…, log=False)`` is a second pass of a step, which logs
            nothing; ``per_parameter`` is like ``gradient``, with one tensor per parameter, or None;
            ``missing`` are the places of parameters that got no gradient from the latest loss.

    ``clipped`` ``(n,)``: in how many steps clipping was active; None without clipping.
    """

    def __init__(
        self, work: LocalTraining, model: Any, group: ClientGroup, optimizer: ClientOptimizer
    ) -> None:
        methods = work.methods
        self.model = model
        self.group = group
        self.clients = Clients(group)
        self.optimizer = optimizer
        self.methods = methods
        self.hooks = model.hooks
        self.perturb = methods.owner("perturbation")
        self.blind = methods.blind
        self.reduce = methods.owner("reduce_samples")
        self.scale = methods.owner("scale_samples")
        self.reduced = methods.owner("on_samples_reduced")
        self.samples: SampleGradients | None = None
        if methods.reduced_by:
            # Coordinates that are not trained lie anywhere in a layer.
            factored = self.scale is not None and group.untrained is None
            self.samples = SampleGradients(model, work.samples_at_once, factored)
        # `on_loss_gradient` changes only the loss gradient; `on_local_gradient` adds to the result.
        self.changes = methods.on_gradient(BEFORE_CLIPPING)
        self.directions = methods.on_gradient(AFTER_CLIPPING)
        self.rate = methods.owner("step_rate")
        self.step_ends = methods["on_local_step_end"]
        self.limit: Any = work.clip_norm  # a number, or one number per client (n, 1)
        if self.limit is not None:
            group.clipped = torch.zeros(len(model.x), dtype=torch.int64, device=model.x.device)
        # Copying gradients into one vector takes as long as the step of a small network. So it is
        # skipped if nothing needs the gradient as (n, D).
        self.changed = bool(self.changes or self.directions)
        optimizer.set_untrained(group.untrained)
        as_vector = (
            self.samples is not None
            or self.changed
            or self.limit is not None
            or group.untrained is not None
            or not optimizer.plain
        )
        self.per_parameter = None if as_vector else model.per_parameter
        # Any hook may call `gradient_at`, and the first step shows whether one does. Until then the
        # state before the step is kept; afterwards only if it is needed.
        self.first = True
        self.remembers = bool(self.perturb or self.changed or self.rate or self.step_ends)
        self.draws = PassDraws(model.x, work.draws)
        self.before: RandomState | None = None
        # Stacked clients share the buffers of the first client.
        self.buffers: Mapping[str, Tensor] = group.round.buffers_of(group.ids[0])
        self.batch: Any = None
        self.versions: list[int] = []  # of the first step's batch, before its first pass
        self.index: Any = 0
        self.missing: Sequence[int] = ()  # places of the parameters without a gradient
        group.local_step = self
        if self.rate is not None:
            group.rates_used = torch.zeros_like(group.column("steps", group.round.steps))
        group.gradients_a_step = 1 + (self.perturb is not None and not self.blind)

    @property
    def clipped(self) -> Tensor | None:
        return None if self.limit is None else self.group.clipped

    def __call__(self, batch: Any, index: Any) -> None:
        self.batch = batch
        self.index = index
        if self.optimizer.by_step:
            self.optimizer.at(index)
        if self.remembers:
            self.remember()
        gradient = self.loss_gradient()
        self.missing = self.model.missing
        # The learner's hooks get the gradient of its loss, before any method changes it.
        if self.hooks is not None:
            gradient, self.missing = self.hooks.before_optimizer_step(gradient, self.missing)
        if self.per_parameter is None:
            gradient = self.direction(gradient)
        if self.rate is None:
            self.step(gradient)
        else:
            self.step_at(gradient, self.rate)
        self.group.hold(self.group.start)
        for end in self.step_ends:
            checked_nothing(end, self.methods.call(end, self.clients))
        if self.step_ends:
            self.group.hold(self.group.start)
        # `on_train_batch_end` sees the model after the step, as in plain training.
        if self.hooks is not None:
            self.hooks.batch_end(self.missing)
        self.group.step_done()
        if self.first:
            self.first = False
            self.remembers = self.group.gradients_a_step > 1

    def direction(self, gradient: Tensor) -> Tensor:
        """What the client optimizer follows, from the loss gradient ``(n, D)``."""
        clips = self.limit is not None
        gradient = self.after(self.changes, gradient, kept=bool(self.directions) and not clips)
        gradient = self.group.trained_part(gradient)
        # Clipping limits the gradient including corrections, and not the direction.
        if clips:
            gradient = self.clip(gradient)
        return self.group.trained_part(self.after(self.directions, gradient))

    def after(
        self, hooks: Sequence[Callable[..., Any]], gradient: Tensor, kept: bool = False
    ) -> Tensor:
        """The gradient as hooks leave it, one after the other; ``kept``: more hooks follow."""
        for hook in hooks:
            given = gradient
            gradient = self.methods.gradient(hook, self.clients, given)
            # A hook may return rows that it keeps, and the next hook may change its argument in
            # place.
            if gradient is not given and (kept or hook is not hooks[-1]):
                gradient = gradient.clone()
        return gradient

    def step(self, gradient: Any) -> None:
        """Take the client optimizer's step along a direction, or one gradient per parameter."""
        if self.per_parameter is not None:
            self.optimizer.step_each(gradient, self.missing)
        else:
            # If a method changes gradients, all parameters are stepped, whatever the loss depends
            # on.
            self.optimizer.step(gradient, () if self.changed else self.missing)

    def step_at(self, gradient: Any, rate: Callable[..., Any]) -> None:
        """Take the step at the rate times what a method gives, for each client."""
        x = self.model.x
        # Rates are one per client, but an optimizer takes one rate. So take a full step, and then
        # that share of it.
        given = checked_rows(rate, self.methods.call(rate, self.clients), x[:, :1])
        assert self.group.rates_used is not None
        self.group.rates_used.add_(given)
        before = x.clone()
        self.step(gradient)
        # At a rate of 1 the bits are those of the full step.
        x.copy_(before.lerp_(x, given.to(x.dtype)))

    def remember(self) -> None:
        """Remember generators and buffers as the step begins, for gradients at other points."""
        self.before = self.draws.now()
        if self.first:
            # The first step starts with the round's buffers, which no code changes.
            self.versions = versions(self.batch)
        else:
            self.buffers = {name: buffer.clone() for name, buffer in self.model.buffers.items()}

    def gradient_at(self, x: Tensor) -> Tensor:
        """∇ℓ(x; the present batch) ``(n, D)``; generators, logs and buffers stay as they are."""
        if not self.remembers:
            raise RuntimeError(
                "a hook calls clients.gradient_at in a client's first local step or never"
            )
        present_buffers = {name: buffer.clone() for name, buffer in self.model.buffers.items()}
        # The gradient at another point uses the same random numbers and buffers as the step's own
        # pass. Afterwards the step continues where it was.
        self.model.load_buffers(self.buffers)
        try:
            with drawn_again(self.before, self.model.x), self.model.at(x):
                gradient: Tensor = self.passed(self.model.gradient, log=False).clone()
        finally:
            self.model.load_buffers(present_buffers)
        if self.first:
            self.group.gradients_a_step += 1
        return gradient

    def passed(self, gradient_of: Callable[..., Any], **options: Any) -> Any:
        """A gradient of the step's batch.

        Raises:
            UserError: an earlier pass has changed the batch; a learner does so in its first step,
                or never.
        """
        if self.first and self.remembers and versions(self.batch) != self.versions:
            raise UserError(
                "training_step changes its batch in place (x.mul_(…), say), and a method takes "
                "several gradients of each batch, the second of which would be of another batch. "
                "Change a copy: x = x.clone()."
            )
        gradient = gradient_of(self.batch, self.index, **options)
        return self.group.trained_part(gradient)

    def loss_gradient(self) -> Any:
        """∇ℓ at x, or at the perturbed point by the same batch; without weight decay."""
        if self.samples is not None:
            return self.of_samples(self.samples)
        gradient_of: Callable[..., Any] = self.per_parameter or self.model.gradient
        if self.perturb is None:
            return self.passed(gradient_of)
        if self.blind:
            # The step's only pass: it logs, and buffers and generators continue after it.
            e = self.offset(self.perturb, None, self.model.x)
            with self.model.shifted(e):
                return self.passed(gradient_of)
        before = self.before
        with self.perturbed(self.perturb, before):
            gradient = self.passed(gradient_of, log=False)
        self.draws.passed(before)
        return gradient

    def of_samples(self, samples: SampleGradients) -> Tensor:
        """Return a method's gradient ``(n, D)`` from those of the step's samples."""
        x = self.model.x
        total = torch.zeros_like(x, dtype=torch.float64)
        for gradients in samples.of(self.batch, self.index):
            if self.group.untrained is not None:
                gradients.whole.masked_fill_(self.group.untrained, 0.0)
            if self.scale is not None:
                norms = gradients.norms()[None]
                scales = self.methods.call(self.scale, self.clients, norms)
                gradients.add(checked_rows(self.scale, scales, norms)[0], total[0])
            else:
                reduce = self.reduce
                assert reduce is not None
                of_part = self.methods.call(reduce, self.clients, gradients.whole[None])
                total += checked_rows(reduce, of_part, x)
        if self.reduced is not None:
            given = self.methods.call(self.reduced, self.clients, total)
            total = total if given is None else checked_rows(self.reduced, given, x)
        return self.group.trained_part(total.to(x.dtype))

    @contextmanager
    def perturbed(self, perturb: Callable[..., Any], before: RandomState | None) -> Iterator[None]:
        """Within, gradients are at x + e, with the first pass's random numbers."""
        gradient = self.passed(self.model.gradient)
        # The second pass does not count as another batch: running statistics stay those of the
        # first.
        buffers = {name: buffer.clone() for name, buffer in self.model.buffers.items()}
        e = self.offset(perturb, gradient, gradient)
        if before is not None:
            before.restore()
        try:
            with self.model.shifted(e):
                yield
        finally:
            self.model.load_buffers(buffers)

    def offset(self, perturb: Callable[..., Any], gradient: Any, like: Any) -> Any:
        """Return the perturbation e (n, D), which a step adds to x; checked against ``like``."""
        given = () if self.blind else (gradient,)
        e = self.methods.call(perturb, self.clients, *given)
        return self.group.trained_part(checked_rows(perturb, e, like))

    def clip(self, gradient: Tensor) -> Tensor:
        """× min(1, clip_norm/‖g‖), each client over all D coordinates."""
        factor: Tensor = (self.limit / self.clients.norm(gradient)).clamp(max=1)
        assert self.group.clipped is not None
        self.group.clipped.add_((factor < 1)[:, 0])
        return gradient * factor
