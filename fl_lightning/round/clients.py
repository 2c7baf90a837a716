"""The clients' side of a round, as local hooks see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from fl_lightning.errors import UserError, refuse_both
from fl_lightning.introspection.hook_arguments import unasked
from fl_lightning.learner.layout import Layout
from fl_lightning.machine.device_memory import to_device
from fl_lightning.round.client_group import LOSS, ClientGroup
from fl_lightning.storage.secret import drawn_from


class HookSubject:
    """The clients or the server, as a hook gets them."""

    __slots__ = ("_hook",)

    def __init__(self) -> None:
        self._hook: Callable[..., Any] | None = None  # the hook that is being called

    @property
    def _caller(self) -> str:
        if self._hook is None:
            return "a method of this run"
        return type(getattr(self._hook, "__self__", self._hook)).__name__

    def _check_asked(self, value: str) -> None:
        """Refuse a method that reads a value for which it does not ask.

        A hook that is a function of its own, and of no method, is not refused.

        Raises:
            UserError: it shows the line to write.
        """
        callback = getattr(self._hook, "__self__", None)
        asks_for = getattr(callback, "asks_for", None)
        if asks_for is not None and not asks_for(value):
            assert self._hook is not None
            raise unasked(callback, value, self._hook)


class Clients(HookSubject):
    """``n`` clients that train together, as local hooks see them.

    One number per client is a column ``(n, 1)``, except ``ids`` ``(n,)``. Attributes that a hook
    sets can be read in its later hooks of the round, for only these clients.
    """

    __slots__ = ("__dict__", "_group")

    def __init__(self, group: ClientGroup) -> None:
        super().__init__()
        self._group = group
        # An attribute that a hook assigns to its clients is there for later hooks until the round
        # ends.
        self.__dict__ = group.attributes

    @property
    def _lent(self) -> list[tuple[str, Tensor]]:
        """Return the run's vectors that hooks get without a copy, by their names in hooks."""
        group = self._group
        lent = group.round.lent
        if group.start is not None:
            lent = [*lent, ("clients.start", group.start)]
        if group.kept_origin is not None:
            lent = [*lent, ("clients.origin", group.kept_origin)]
        return lent

    @property
    def client_ids(self) -> list[int]:
        """Clients' ids as a list; a local step that reads them is not replayed for others."""
        self._group.looked_up = True
        return self._group.ids

    @property
    def ids(self) -> Tensor:
        """Return the clients' ids ``(n,)``, int64."""
        group = self._group
        if "ids" not in group.columns:
            group.columns["ids"] = to_device(group.ids, group.x.device)
        return group.columns["ids"]

    @property
    def x(self) -> Tensor:
        """Return the clients' models ``(n, D)``; assigning copies into them."""
        return self._group.x

    @x.setter
    def x(self, value: Tensor) -> None:
        if value is not self._group.x:
            self._group.x.copy_(value)

    @property
    def w(self) -> Tensor:
        """The server's model w^t ``(D,)``."""
        models = self._group.models_of
        if models and self._caller != models and self._caller not in self._group.measuring:
            why = f"uses clients.w, but with {models} clients train from that method's own models"
            refuse_both(models, self._caller, f"{self._caller} {why}")
        return self._group.round.w

    @property
    def current_w(self) -> Tensor:
        """Return the server's model of this round ``(D,)``.

        It is another than ``w`` in asynchronous runs, in which clients may begin at an earlier one.
        """
        w, present = self.w, self._group.round.current_w
        return w if present is None else present

    @property
    def initial_model(self) -> Tensor:
        """Return w^0 ``(D,)``; it exists if a state of the run has ``initial="initial_model"``.

        Raises:
            UserError: no state has it.
        """
        return self._group.round.initial_model

    @property
    def evaluated(self) -> Tensor:
        """Return the model evaluated last ``(D,)``: w^t, unless a method evaluates another one.

        ``PartialAveraging`` and methods with the hook ``evaluated`` do so.

        Raises:
            UserError: the method's class has no ``reads_evaluated = True``.
        """
        self._check_asked("evaluated")
        return self._group.round.evaluated

    @property
    def num_clients(self) -> int:
        """Registered clients m."""
        return self._group.round.num_clients

    @property
    def start(self) -> Tensor:
        """Return x_{i,0} ``(n, D)``, from the first step on."""
        if self._group.start is None:
            raise RuntimeError(
                "clients.start can be read from the first local step on, and not in on_local_start"
            )
        return self._group.start

    @property
    def trained(self) -> Tensor:
        """Return ``(n, D)`` bool: the coordinates that the clients train in this round."""
        untrained = self._group.untrained
        return torch.ones_like(self._group.x, dtype=torch.bool) if untrained is None else ~untrained

    @property
    def trained_by_all(self) -> Tensor | None:
        """Return ``(D,)`` bool: the coordinates that every client of the round trains; None:
        all, or clients differ.
        """
        return self._group.round.trained

    @property
    def round(self) -> int:
        """t = 0, 1, …"""
        return self._group.round.t

    @property
    def layout(self) -> Layout:
        """Return the place of each parameter in a vector of D numbers."""
        return self._group.round.layout

    @property
    def lr(self) -> Tensor:
        """Return this round's client learning rate, a scalar tensor."""
        rates = self._group.round.rates
        rates.require_constant(self._caller)
        return rates.lr

    @property
    def momentum(self) -> float:
        """Return ρ of the client optimizer's momentum, μ ← ρ μ + g from μ = 0; 0 if it has none.

        Raises:
            UserError: it has momentum of another kind (Nesterov's, dampened, kept over rounds).
        """
        rates = self._group.round.rates
        rates.require_known_momentum(self._caller)
        return rates.momentum

    @property
    def weight_decay(self) -> float:
        """Λ of the client optimizer; 0 if weight decay is not part of the gradient (AdamW)."""
        rates = self._group.round.rates
        rates.require_one(self._caller)
        return rates.weight_decay

    @property
    def steps(self) -> Tensor:
        """K_i ``(n, 1)``."""
        return self._group.column("steps", self._group.round.steps)

    def steps_of(self, epochs: float) -> Tensor:
        """Return the local steps of so many epochs ``(n, 1)``, whatever K_i is."""
        group = self._group
        name = f"steps of {epochs}"
        if name in group.columns:
            return group.columns[name]
        assert group.round.steps_of is not None
        return group.column(name, {i: group.round.steps_of(i, epochs) for i in group.ids})

    @property
    def step(self) -> Tensor:
        """Number of the present local step, from 0, an int64 scalar; in the hooks of a step."""
        # A tensor that counts on the device, so that each replay of a recorded step reads its own
        # number.
        group = self._group
        if group.step is None:
            group.step = to_device(self._in_step("clients.step").index, group.x.device)
        return group.step

    @property
    def place_in_step(self) -> int:
        """Return the number of the present batch among those of its step, from 0.

        It is 0 unless the run has ``accumulate``. If a step has several passes, each pass begins at
        0 again. Read it in ``local_loss`` and ``local_output``.
        """
        return self._group.place_in_step

    def gradient_at(self, x: Tensor) -> Tensor:
        """Return the gradient ``(n, D)`` of the present batch's loss at x ``(D,)`` or ``(n, D)``.

        The gradient does not include weight decay. Call it in the hooks of a step, from the first
        step on. The gradient uses the same batch, the same random numbers and the buffers with
        which the step began. Computing it does not change x, buffers and logs; the result has its
        own memory. A call costs as much as the loss gradient, and ``cost/gradients`` counts it.
        """
        self._check_batch("clients.gradient_at")
        gradient: Tensor = self._in_step("clients.gradient_at").gradient_at(x)
        return gradient

    def seen_at(self, x: Tensor, training: bool = False) -> dict[str, Any]:
        """Return the outputs of the method's taps at x ``(D,)`` or ``(1, D)``, by name and without
        graph.

        The outputs use the same batch, the same random numbers and the buffers with which the
        client's round began. The pass changes nothing: x, buffers and logs stay the same. Call it
        in ``local_loss``, and in the hooks of a step, from the first step on. ``cost/forwards``
        counts the pass.

        Args:
            training: in training mode, with statistics of the batch; if False, in evaluation mode.
        """
        self._check_batch("clients.seen_at")
        assert self._group.seen_at is not None
        return self._group.seen_at(self._caller, x, training)

    @property
    def label_counts(self) -> Tensor:
        """Return how many training samples of each class the clients have ``(n, C)``, int64, C =
        num_classes.

        A sample that a client has twice counts twice; held-out samples do not count.

        Raises:
            UserError: the data have no class labels.
        """
        self._check_samples("clients.label_counts")
        group = self._group
        if "label_counts" not in group.columns:
            assert group.label_counts is not None
            counts = [group.label_counts(client) for client in group.ids]
            if any(row is None for row in counts):
                raise UserError(
                    f"method: {self._caller} reads how many samples of each class clients have, "
                    "but the training data have no class labels. Accepted are whole numbers from "
                    "0, one per sample: give targets, or use another method."
                )
            group.columns["label_counts"] = to_device(counts, group.x.device)
        return group.columns["label_counts"]

    def _in_step(self, what: str) -> Any:
        if self._group.local_step is None:
            raise RuntimeError(
                f"{what} can be read only in the hooks of a local step, and not before or after a "
                "client's steps"
            )
        return self._group.local_step

    @property
    def sizes(self) -> Tensor:
        """Numbers of samples N_i ``(n, 1)``."""
        return self._group.column("sizes", self._group.round.sizes)

    @property
    def weights(self) -> Tensor:
        """Return the aggregation weights p_i ``(n, 1)`` among the round's participants."""
        group = self._group
        if "weights" not in group.columns:
            weights = group.round.weights
            group.columns["weights"] = group.column("weights", weights) / sum(weights.values())
        return group.columns["weights"]

    @property
    def origin(self) -> Tensor:
        """Return the points ``(n, D)`` at which the clients' present displacements began.

        A displacement begins at ``start``, except on parts that a client has kept since an earlier
        round.
        """
        kept = self._group.kept_origin
        return self.start if kept is None else kept

    @property
    def elapsed(self) -> Tensor:
        """Return Σ η K since ``origin``: ``(n, 1)``, or ``(n, D)`` with partial averaging."""
        self._group.round.rates.require_one(self._caller)
        return self._group.elapsed()

    def moves(self, steps: Tensor) -> None:
        """In ``on_local_start``, say in how many of its K_i steps each coordinate moves:
        ``(n, D)``.

        ``elapsed`` and ``mean_gradient`` then count only these, as steps of the round's mean rate.
        """
        self._group.moving = steps / self.steps

    @property
    def mean_gradient(self) -> Tensor:
        """Return (origin - x) / elapsed ``(n, D)``, at the end of a round; 0 if elapsed is 0.

        If rates change from step to step, steps count by their rates. With momentum, another
        optimizer or clipping this is another vector: a method says so by the note MEAN_GRADIENT.
        """
        elapsed = self.elapsed
        return torch.where(elapsed > 0, (self.origin - self.x) / elapsed, 0.0).to(self.x.dtype)

    @property
    def loss(self) -> Tensor:
        """Return the mean loss of the clients' local steps ``(n, 1)``, in ``on_local_end``.

        It is the loss of a step's first pass: at the model, or at the perturbed point if the method
        takes only one.

        Raises:
            UserError: the method does not ask for it.
            RuntimeError: it is read in another hook.
        """
        self._check_asked("loss")
        self._check_samples("clients.loss")
        if LOSS not in self._group.logs:
            raise RuntimeError("clients.loss can be read only in on_local_end")
        return self._group.logs[LOSS].reshape(-1, 1)

    def norm(self, v: Tensor) -> Tensor:
        """‖v‖ of each client's row over the coordinates that it trains: ``(n, D)`` → ``(n, 1)``."""
        if v.shape == self._group.x.shape:
            v = self._group.trained_part(v)
        norm: Tensor = torch.linalg.vector_norm(v, dim=1, keepdim=True)
        return norm

    def full_gradient(self, x: Tensor) -> Tensor:
        """Gradient ``(n, D)`` of whole objectives with decay, at x ``(D,)`` or ``(n, D)``."""
        self._check_samples("clients.full_gradient")
        group = self._group
        weight_decay = self.weight_decay
        assert group.full_gradient is not None
        group.looked_up = True  # the counts are those of these clients' samples
        # All steps do the same, so the first step's counts stand for each of them.
        if group.local_step is None:
            group.full_gradients += 1
        elif group.local_step.first:
            group.full_gradients_a_step += 1
        return group.full_gradient(group, x) + weight_decay * x

    def evaluate(self, x: Tensor, what: Literal["train", "test"] = "train") -> dict[str, Tensor]:
        """Return loss and metrics of the clients' own samples at x ``(D,)`` or ``(n, D)``.

        The values are columns ``(n, 1)`` by name, NaN for a client without samples: ``"loss"``, and
        the logs of ``validation_step``, without ``val/``. The learner is in evaluation mode and has
        the server's buffers. The evaluation reads values, so a local step that calls it is not
        captured.

        Args:
            what: which samples are meant: the clients' training samples, or each client's test
                samples.
        """
        self._check_samples("clients.evaluate")
        assert self._group.evaluate is not None
        self._group.looked_up = True
        if what == "train":
            self._group.count_evaluation(self._caller)
        return self._group.evaluate(self._group, x, what)

    def private_generator(self, purpose: str, step: int, onto: Tensor) -> np.random.Generator:
        """Return random numbers for a client's noise, which no reader of the run can compute.

        The numbers are keyed by (secret, purpose, round, client, step, digest of ``onto``), so
        different values never get the same noise. Over sites the secret is the site's. If the
        method draws from a seed, they are keyed by (that seed, purpose, round, client, step).

        Args:
            purpose: name of the draw.
            step: number of the local step.
            onto: all values to which the noise is added.
        """
        key = self._group.round.noise_of_clients
        if key is None:
            raise RuntimeError(
                "only a method with the attribute clients_draw_from may call "
                "clients.private_generator"
            )
        content = onto.detach().cpu().contiguous().view(-1).numpy().data
        (client,) = self.client_ids
        return drawn_from(key, purpose, self.round, client, step, onto=content)

    def _check_batch(self, what: str) -> None:
        """Refuse what needs a step's batch, where a method takes the samples one by one.

        Raises:
            UserError: it names both methods.
        """
        if other := self._group.reduced_by:
            why = f"takes a step's whole batch, but {other} takes the gradient of each sample"
            refuse_both(other, self._caller, f"{self._caller} calls {what}, which {why}")

    def _check_samples(self, what: str) -> None:
        """Refuse values of the clients' samples, if a method protects these.

        Callbacks that only measure may read them.

        Raises:
            UserError: it names both methods.
        """
        other = self._group.protected_by
        if other and other != self._caller and self._caller not in self._group.measuring:
            why = "is computed from samples, and that is neither clipped nor noised"
            refuse_both(other, self._caller, f"{self._caller} reads {what}, which {why}")

    def log(self, name: str, values: Tensor) -> None:
        """Log one value per client, ``(n,)`` or ``(n, 1)``; ``name`` shows their mean."""
        # Copy the values: rows of states may be changed in place afterwards.
        self._group.logs[name] = values.detach().reshape(len(self._group.ids)).clone()

    def sent(
        self, parameters: float | Tensor | None = None, bytes: float | Tensor | None = None
    ) -> None:
        """Say how much each client sends by ``transmit``, instead of D parameters.

        Args:
            parameters, bytes: one number for each client, or a tensor ``(n, 1)`` or ``(n,)`` with
                one number per client.
        """
        self._group.transmitted = (parameters, bytes)


class AfterExchange(Clients):
    """A client in ``on_exchange``: it has its states as it left them, and no model ``x``.

    ``finished``: how many clients of the round exchange.
    """

    __slots__ = ("finished",)

    def __init__(self, group: ClientGroup, finished: int) -> None:
        super().__init__(group)
        self.finished = finished

    @property
    def x(self) -> Tensor:
        _no_model()

    @x.setter
    def x(self, value: Tensor) -> None:
        _no_model()


def _no_model() -> NoReturn:
    raise RuntimeError(
        "on_exchange has no clients.x: assign what you need of it to an Exchanged, a Scratch or a "
        "ClientState in on_local_end"
    )
