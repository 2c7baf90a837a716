"""The loss of clients' samples at any vector.

The loss is measured on a copy of the learner, in evaluation mode, without augmentation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from fl_lightning.aggregation import metric_states
from fl_lightning.aggregation.over_processes import TreeSum, sum_over_processes, visiting_order
from fl_lightning.client import batch_callbacks
from fl_lightning.client.client_trainer import add_error_note
from fl_lightning.client.flat_learner import Convert, FlatLearner
from fl_lightning.client.forward_pass import conversion, forward_context
from fl_lightning.client.step_hooks import dense, differentiated
from fl_lightning.evaluation.validated_model import evaluated
from fl_lightning.evaluation.validation import BEFORE, ValidationEpoch, hooks_of
from fl_lightning.learner.attributes import Attributes
from fl_lightning.learner.layout import Layout, flatten
from fl_lightning.learner.modules import called_with, keeps_frozen, modes, overrides
from fl_lightning.machine.processes import gathered, place
from fl_lightning.machine.random_state import random_state_kept, seed_client
from fl_lightning.metrics import without_prefix
from fl_lightning.round.client_sums import Sums
from fl_lightning.round.global_model import GlobalModel
from fl_lightning.sampling import generator

Samples = Mapping[int, NDArray[np.int64]]  # client → positions in the training data
Counted = tuple[Any, int]  # a batch and its number of samples
Share = Callable[[], list[Counted]]
# (batch, its number of samples, its index) -> what it adds to a sum over samples
Term = Callable[[Any, int, int], "OverSamples"]
VALIDATION = "on_validation_batch_start"
# Limits of a batch: samples, memory, and the memory of its backward pass.
MOST = 1000
BATCH_BYTES = 2**26
GRAPH_BYTES = 2**28


@dataclass
class OverSamples(Sums):
    """Sums over samples.

    ``samples`` is their number. ``loss``, ``gradient`` and ``product`` (of the Hessian and a
    vector) are weighted by it. ``logs`` are sums of logged values, and ``logged`` the numbers of
    samples that logged them.
    """

    samples: Tensor | None = None
    loss: Tensor | None = None
    gradient: Tensor | None = None
    product: Tensor | None = None
    logs: dict[str, Tensor] = field(default_factory=dict)
    logged: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Measured:
    """Means over ``samples`` samples, counted as often as clients hold them; NaN if there are none.

    ``logged``: values that the learner logs, under its names; ``gradient``: gradient of the loss
    ``(D,)``, float64.
    """

    samples: int
    loss: float
    logged: dict[str, float] = field(default_factory=dict)
    gradient: Tensor | None = None


class Evaluator:
    """Evaluates clients' samples on a copy of the learner as it is, with its state and buffers.

    An evaluation changes nothing of the run: neither its learner, nor random state, metrics or
    logs. The loss is that of ``training_step`` in evaluation mode, and each batch is weighted by
    its samples. Random draws in a step are a function of the seed and the batch. Sums are float64,
    over batches that do not depend on which process computes them. Processes share the work, and 1,
    2, 4, … of them have the same bits. All of them have to call :meth:`mean`.
    ``buffers``: buffers with which each batch starts, at first the learner's.

    Args:
        learner: any LightningModule; ``layout``: layout of its trainable parameters.
        data: a federated data module.
        context: context manager around each forward pass; ``convert``: ``(learner, batch) ->
            batch``, None: batches stay as they are.
        as_buffers: frozen parameters that the learner's steps write, by name: with buffers, they
            begin each batch anew.

    Example:
        >>> from fl_lightning.testing import tiny_run
        >>> module = tiny_run()
        >>> everyone = samples_of(module.trainer.datamodule)
        >>> measured = module.evaluator().mean(module.evaluated_vector, everyone, gradient=True)
        >>> measured.samples, measured.gradient.shape
        (38, torch.Size([31]))
    """

    # Callbacks may change batches in validation in another way than in training.
    convert_validation: Convert | None = None

    def __init__(
        self,
        learner: Any,
        layout: Layout,
        data: Any,
        seed: int = 0,
        context: Callable[[], AbstractContextManager[Any]] = torch.enable_grad,
        convert: Convert | None = None,
        as_buffers: Collection[str] = (),
    ) -> None:
        parameter = next(p for p in learner.parameters() if p.requires_grad)
        x = torch.empty(1, layout.size, dtype=parameter.dtype, device=parameter.device)
        copy = FlatLearner(learner, layout, x, context, convert)
        copy.treat_as_buffers(as_buffers)
        self.copy = copy.another(aliased=keeps_frozen(learner))
        self.copy.present.silent = self.copy.present.measures = True
        self.copy.begin(data)
        self._modes = [training for _, training in modes(self.copy.learner)]
        self.copy.learner.eval()
        self.copy.forks = False
        for part in self.copy.learner.modules():
            # A sparse gradient cannot be differentiated; a dense one has the same values.
            if isinstance(part, nn.Embedding | nn.EmbeddingBag):
                part.sparse = False
        self.data = data
        self.seed = seed
        self.buffers: Mapping[str, Tensor] = {
            name: buffer.clone() for name, buffer in self.copy.buffers.items()
        }
        self._forward = self.copy.forward_context
        self.copy.forward_context = self._context
        # The loss has a graph if its gradient is needed, or if the learner's step itself takes
        # gradients.
        self._graph = False
        self._builds_graph = False
        # By client, why a metric that the learner logs in validation has no value.
        self.failures: dict[int, list[str]] = {}
        # Whether validation leaves the learner's attributes unchanged; None: not known yet.
        self._stateless: bool | None = False if hooks_of(learner) else None

    @classmethod
    def of_run(cls, run: Any, trainer: Any, exact: bool = False) -> Evaluator:
        """As :meth:`of_model`, of a FederatedRun; ``exact``: without autocast."""
        return cls.of_model(run.model, trainer, trainer.datamodule, run.seed(trainer), exact)

    @classmethod
    def of_model(
        cls, model: GlobalModel, trainer: Any, data: Any, seed: int, exact: bool = False
    ) -> Evaluator:
        """Evaluator of a GlobalModel, with the batches that clients get from ``data``."""
        device = trainer.strategy.root_device
        context = torch.enable_grad if exact else forward_context(trainer, device)
        convert = conversion(trainer, model.learner, data)
        evaluator = cls(model.learner, model.layout, data, seed, context, convert, model.as_buffers)
        if batch_callbacks.looking(trainer) or batch_callbacks.looking(trainer, VALIDATION):
            evaluator.convert_validation = conversion(trainer, model.learner, data, VALIDATION)
        return evaluator

    @classmethod
    def of_evaluated(cls, run: Any, trainer: Any, exact: bool = False) -> tuple[Evaluator, Tensor]:
        """Return a FederatedRun's evaluator, and the weights ``(D,)`` that Lightning validates.

        The weights include averages of WeightAveraging and changes by the learner's validation
        hooks; the same holds for the evaluator's buffers.
        """
        evaluator = cls.of_run(run, trainer, exact)
        vector, evaluator.buffers = evaluated(run.model, trainer)
        vector, evaluator.buffers = evaluator.model(vector)
        return evaluator, vector

    def follow(self, learner: Any, buffers: Mapping[str, Tensor]) -> None:
        """Use these buffers from now on, and what the learner's hooks have changed."""
        self.copy.follow(learner)
        self.copy.begin(self.data)
        self.copy.learner.eval()
        self.buffers = {name: buffer.clone() for name, buffer in buffers.items()}

    # ---- what is measured

    def mean(
        self, x: Tensor, samples: Samples, gradient: bool = False, step: str = "training_step"
    ) -> Measured:
        """Return means at x ``(D,)`` over all these samples together, the same in every process.

        Args:
            gradient: whether to compute the gradient of the loss, too.
            step: whose logs are returned, ``training_step``'s or ``validation_step``'s; the loss is
                always ``training_step``'s.
        """
        size = self.size(x, samples, GRAPH_BYTES) if gradient else self.size(x, samples)
        return self.mean_of(x, self.shares(samples, size), gradient, step)

    def mean_of(
        self,
        x: Tensor,
        shares: Sequence[Share],
        gradient: bool = False,
        step: str = "training_step",
    ) -> Measured:
        total = self.sum(x, shares, self._term(gradient, step))
        states = gathered(self.copy.take_metrics())
        logged = {**_means(total), **self._of_metrics(states)}
        if total.samples is None or total.loss is None:
            return Measured(0, math.nan, logged)
        number = int(total.samples)
        mean_gradient = None if total.gradient is None else total.gradient / number
        return Measured(number, float(total.loss / number), logged, mean_gradient)

    def client(
        self, x: Tensor, client: int, indices: NDArray[np.int64], step: str = "training_step"
    ) -> dict[str, float]:
        """Return a client's samples, loss and logs at x ``(D,)``, only in this process.

        Args:
            step: whose logs are returned; with ``validation_step`` as in :meth:`validated`, but at
                x itself, even if the learner's hooks replace the model.
        """
        if not len(indices):
            return {"samples": 0, "loss": math.nan}
        trains = step == "training_step"
        shares = self._of_client(x, client, indices, twice=not trains)
        # Only within this call does the learner's Trainer show this client's numbers of batches.
        self.copy.begin(self.data, lambda: client)
        total = self.sum(x, shares, self._term(False, step if trains else ""), alone=True)
        self.copy.begin(self.data)
        assert total.loss is not None and total.samples is not None
        loss = float(total.loss / int(total.samples))
        values = {"samples": len(indices), "loss": loss}
        if trains:
            return {**values, **_means(total), **self._of_metrics([self.copy.take_metrics()])}
        if getattr(self.data, "eval_batch_size", None):
            shares = self._of_client(x, client, indices, validated=True)
        return {**self._validated(x, client, shares, at_x=True), **values}

    def validated(self, x: Tensor, client: int, indices: NDArray[np.int64]) -> dict[str, float]:
        """Return what ``Trainer.validate`` gives for the model x ``(D,)`` on these samples.

        Returns:
            The values are ``samples``, all that the learner logs under their names, and ``loss``:
            the loss that it logs in validation, else that of ``training_step`` in evaluation mode.
        """
        if not len(indices):
            return {"samples": 0, "loss": math.nan}
        shares = self._of_client(x, client, indices, validated=True)
        logged = self._validated(x, client, shares)
        losses = [value for name, value in logged.items() if without_prefix(name) == "loss"]
        loss = losses[0] if losses else self._training_loss(x, client, indices)
        return {"samples": len(indices), **logged, "loss": loss}

    def model(self, x: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Return the weights ``(D,)`` and buffers with which the learner validates the model x.

        They differ from x and :attr:`buffers` if the learner's own hooks, such as
        ``on_validation_start``, replace them.
        """
        if not hooks_of(self.copy.learner) & frozenset(BEFORE):
            return x, self.buffers
        own = self._for_validation()
        own.begin(self.data)
        own.present.begin_validation(0, own.learner)
        with self._at(x, own):
            own.load_buffers(self.buffers)
            self._epoch(own).begin()
        parameters = dict(own.learner.named_parameters())
        weights = flatten([parameters[name].detach() for name in own.layout])
        return weights.to(x), {name: buffer.clone() for name, buffer in own.buffers.items()}

    def _training_loss(self, x: Tensor, client: int, indices: NDArray[np.int64]) -> float:
        buffers = self.buffers
        point, self.buffers = self.model(x)
        try:
            return self.client(point, client, indices)["loss"]
        finally:
            self.buffers = buffers

    def _of_client(
        self,
        x: Tensor,
        client: int,
        indices: NDArray[np.int64],
        validated: bool = False,
        twice: bool = False,
    ) -> list[Share]:
        """Return one client's batches, with validation's size if they are ``validated``.

        ``twice``: they are read once for two passes, unless they are too many for the memory.
        """
        samples = {client: indices}
        size = getattr(self.data, "eval_batch_size", None) if validated else None
        size = size or self.size(x, samples)
        return self.shares(samples, size, alone=True, keep=twice and len(indices) <= size)

    def _validated(
        self, x: Tensor, client: int, shares: list[Share], at_x: bool = False
    ) -> dict[str, float]:
        """Return the logs of one validation epoch on a client's batches; empty without a step.

        ``at_x``: measure x itself, even if the learner's hooks exchange weights.
        """
        if not overrides(self.copy.learner, "validation_step"):
            return {}
        own = self._for_validation()
        # Compare once which attributes the steps change.
        before = Attributes(own.learner) if self._stateless is None else None
        own.begin(self.data, lambda: client)
        own.present.begin_validation(len(shares), own.learner)
        try:
            with self._at(x, own):
                own.load_buffers(self.buffers)
                epoch = self._epoch(own)
                epoch.begin()
                if at_x:
                    own.go_to(x)
                logged = epoch.run(chain.from_iterable(share() for share in shares))
                if epoch.logs.failures:
                    self.failures[client] = epoch.logs.failures
        except Exception as error:
            add_error_note(error, f"in the validation of client {client} on its own samples")
            raise
        if before is not None:
            self._stateless = not before.changed(Attributes(own.learner))
        if own is self.copy:
            own.attach()
            own.begin(self.data)
        return logged

    def _for_validation(self) -> FlatLearner:
        if self._stateless:
            return self.copy
        own = self.copy.another(aliased=keeps_frozen(self.copy.learner))
        if "on_validation_model_eval" in hooks_of(own.learner):
            for part, training in zip(own.learner.modules(), self._modes, strict=True):
                part.training = training
        return own

    def _epoch(self, own: FlatLearner) -> ValidationEpoch:
        def seed(index: int) -> None:
            seed_client(self.seed, 0, index, "evaluate")

        self._graph = False
        convert = self.convert_validation or self.copy.convert
        return ValidationEpoch(own.learner, self._context, convert, seed)

    # ---- sums over samples

    def shares(
        self, samples: Samples, size: int, alone: bool = False, keep: bool = False
    ) -> list[Share]:
        """Yield this process's batches of up to ``size`` samples, each read when it is requested.

        A batch takes the next samples in the order of the clients; small clients share a batch if
        tensors allow it. ``alone``: yield the batches of all processes. ``keep``: read them now,
        for many passes over the same samples.
        """
        world, rank = (1, 0) if alone else place()
        shares: list[Share] = [
            partial(self._read, own) for own in pieces(samples, size)[rank::world]
        ]
        return [partial(copies, share()) for share in shares] if keep else shares

    def sum(
        self, x: Tensor, shares: Sequence[Share], term: Term, alone: bool = False
    ) -> OverSamples:
        """Return Σ of ``term`` at x ``(D,)`` over all processes' batches (``alone``: its own).

        The sum is empty if there are no batches.
        """
        world, rank = (1, 0) if alone else place()
        tree: TreeSum[OverSamples] = TreeSum(len(shares))
        with self._at(x):
            for j in visiting_order(len(shares)):
                values = OverSamples()
                for batch, number in shares[j]():
                    for key, value in self._one(term, batch, number, j * world + rank).parts():
                        before = values.get(key)
                        values.put(key, value if before is None else before + value)
                tree.add(j, values)
        total = tree.total if alone else sum_over_processes(tree.total, OverSamples)
        return total or OverSamples()

    def size(self, x: Tensor, samples: Samples, graph_bytes: int = 0) -> int:
        """Return the number of samples that fit into a batch.

        The number is found from the first two samples, so it is the same in every process.
        ``graph_bytes``: memory for the graph of a backward pass; 0 if there is no graph.
        """
        first = next(((c, indices[:2]) for c, indices in samples.items() if len(indices)), None)
        if first is None:
            return 1
        ((batch, number), *_) = self._read([first])
        batch_bytes = sum(t.nbytes for t in tree_leaves(batch) if isinstance(t, Tensor))
        fitting = BATCH_BYTES / max(1, batch_bytes / number)
        if graph_bytes:
            kept_bytes = self._bytes_of_graph(x, batch, number)
            fitting = min(fitting, graph_bytes / max(1, kept_bytes / number))
        return max(1, min(MOST, int(fitting)))

    def _bytes_of_graph(self, x: Tensor, batch: Any, number: int) -> int:
        parameters = self.copy.x.untyped_storage().data_ptr()
        kept = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal kept
            # The parameters take memory in any case, however many samples a batch has.
            if tensor.untyped_storage().data_ptr() != parameters:
                kept += tensor.nbytes
            return tensor

        def term(batch: Any, number: int, index: int) -> OverSamples:
            return OverSamples(loss=self.loss(batch, index, True).detach())

        with self._at(x), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            self._one(term, batch, number, 0)
        return kept

    def loss(self, batch: Any, index: int, graph: bool) -> Tensor:
        """Return the mean loss of a batch; with ``graph`` also the graph of its gradient."""
        self._graph = graph or self._builds_graph
        try:
            return self.copy.loss(batch, index)[1]
        except RuntimeError as error:
            # The learner's step takes gradients itself and needs a graph, so compute it again with
            # one.
            if self._graph or "does not require grad" not in str(error):
                raise
        self._builds_graph = True
        self.copy.logged = {}
        return self.loss(batch, index, graph)

    @contextmanager
    def _context(self) -> Iterator[None]:
        with self._forward(), torch.set_grad_enabled(self._graph):
            yield

    def _term(self, gradient: bool, step: str) -> Term:
        own = self.copy

        def term(batch: Any, number: int, index: int) -> OverSamples:
            own.logging = step == "training_step"
            # If both steps share a metric, values from training_step must not count in validation.
            with nullcontext() if own.logging else own.metrics_kept():
                loss = self.loss(batch, index, gradient)
            values = OverSamples(loss=loss.detach().double() * number)
            if gradient:
                gradients = dense(differentiated(loss, own.parameters), own.parameters)
                values.gradient = flatten(gradients).double() * number
            own.logging = True
            if step == "validation_step":
                self._validation(batch, index)
            # A batch need not log every name, so each name counts its own samples.
            # Filling does not wait for a GPU, and copying a number to it would.
            values.samples = torch.full((), number, dtype=torch.int64, device=loss.device)
            for name, logged in own.logged.items():
                mean = torch.stack([value.double().reshape(()) for value in logged]).mean()
                values.logs[name] = mean * number
                values.logged[name] = values.samples.double()
            return values

        return term

    def _validation(self, batch: Any, index: int) -> None:
        """Take a validation step, with its batch hooks, on samples of many clients."""
        self._graph = False
        learner = self.copy.learner
        if self.convert_validation is not None:
            batch = self.convert_validation(learner, self._given)
        hooks = hooks_of(learner)
        with self._context():
            if "on_validation_batch_start" in hooks:
                learner.on_validation_batch_start(
                    *called_with(learner.on_validation_batch_start, batch, index)
                )
            learner.validation_step(*called_with(learner.validation_step, batch, index))

    def _one(self, term: Term, batch: Any, number: int, index: int) -> OverSamples:
        # A step's random draws depend only on the batch's number, and not on the process that
        # computes it.
        self.copy.logged = {}
        self.copy.load_buffers(self.buffers)
        seed_client(self.seed, 0, index, "evaluate")
        self.copy.present.index = index
        try:
            if self.convert_validation is not None:
                self._given = copy.deepcopy(batch)
            if self.copy.convert is not None:
                batch = self.copy.convert(self.copy.learner, batch)
            return term(batch, number, index)
        except Exception as error:
            place = f"in an evaluation of clients' samples, batch {index}"
            add_error_note(error, f"{place} (counted from 0)")
            raise

    @contextmanager
    def _at(self, x: Tensor, own: FlatLearner | None = None) -> Iterator[None]:
        own = own or self.copy
        own.reset()
        own.go_to(x)
        with random_state_kept(own.x), own.present.lending():
            yield

    def _of_metrics(self, states: Sequence[metric_states.MetricStates | None]) -> dict[str, float]:
        by_rank = {rank: state for rank, state in enumerate(states) if state is not None}
        return metric_states.merged_into(self.copy.learner, by_rank) if by_rank else {}

    def _read(self, batch: list[tuple[int, NDArray[np.int64]]]) -> list[Counted]:
        device = self.copy.x.device
        parts: list[Counted] = []
        for client, indices in batch:
            parts += self.data.full_batches(client, device, indices, len(indices))
        return together(parts)


def _means(total: OverSamples) -> dict[str, float]:
    return {name: float(value / total.logged[name]) for name, value in total.logs.items()}


def samples_of(data: Any) -> Samples:
    return {i: data.client_indices(i) for i in range(int(data.num_clients))}


def drawn(data: Any, number: int | None, seed: int, purpose: str) -> Samples:
    """Draw ``number`` of all clients' samples, without replacement.

    If ``number`` is None, or there are no more samples, all are returned.
    A sample that several clients hold can occur several times. The draw is a function of (seed,
    purpose).
    """
    sizes = data.client_sizes()
    total = int(sizes.sum())
    if number is None or number >= total:
        return samples_of(data)
    chosen = np.sort(generator(seed, purpose).choice(total, number, replace=False, shuffle=False))
    ends = np.cumsum(sizes)
    clients = np.searchsorted(ends, chosen, side="right")
    samples: dict[int, NDArray[np.int64]] = {}
    for i in np.unique(clients).tolist():
        first = ends[i] - sizes[i]
        samples[i] = data.client_indices(i)[chosen[clients == i] - first]
    return samples


def pieces(samples: Samples, size: int) -> list[list[tuple[int, NDArray[np.int64]]]]:
    """Batches of exactly ``size`` samples, except the last, as parts (client, its samples)."""
    batches: list[list[tuple[int, NDArray[np.int64]]]] = []
    room = 0
    for client, indices in samples.items():
        start = 0
        while start < len(indices):
            if room == 0:
                batches.append([])
                room = size
            piece = indices[start : start + room]
            batches[-1].append((client, piece))
            start = start + len(piece)
            room = room - len(piece)
    return batches


def together(read: list[Counted]) -> list[Counted]:
    """Join batches if all their leaves are tensors with one row per sample; else leave them."""
    flat = [tree_flatten(batch) for batch, _ in read]
    first, spec = flat[0]
    if len(read) == 1 or not first:
        return read
    for (leaves, own_spec), (_, number) in zip(flat, read, strict=True):
        if own_spec != spec:
            return read
        for leaf, of_first in zip(leaves, first, strict=True):
            if not isinstance(leaf, Tensor) or not leaf.ndim or len(leaf) != number:
                return read
            if leaf.shape[1:] != of_first.shape[1:] or leaf.dtype != of_first.dtype:
                return read
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    whole = [torch.cat(column) for column in columns]
    return [(tree_unflatten(whole, spec), sum(number for _, number in read))]


def copies(batches: list[Counted]) -> list[Counted]:
    return [(tree_map(_copied, batch), number) for batch, number in batches]


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf
