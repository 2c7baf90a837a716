"""A federated method is a callback: it has hooks in the order of a round, and declares its state.

The framework saves, moves, counts and restores declared state; a method keeps nothing hidden.
Shapes: ``D`` trainable parameters as one vector, ``n`` clients trained together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning import sampling
from fl_lightning.checks.notes import (
    CLASS_LABELS,
    MEAN_GRADIENT,
    ROUND_RATE,
    UNIFORM_OPTIMUM,
    Note,
    Refusal,
    RunFacts,
)
from fl_lightning.errors import Diverged, UserError, refuse_both, suggest
from fl_lightning.introspection.accepted import (
    Above,
    AtLeast,
    AtMost,
    Below,
    BelowOne,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    UnitInterval,
    check,
)
from fl_lightning.introspection.hook_arguments import asks_for, may_take, takes
from fl_lightning.introspection.init_args import Given
from fl_lightning.introspection.papers import Paper
from fl_lightning.learner.layout import Layout
from fl_lightning.machine.lightning import pl
from fl_lightning.round import low_rank, privacy
from fl_lightning.round import quantization as wire
from fl_lightning.round.base_weights import Base
from fl_lightning.round.clients import AfterExchange, Clients
from fl_lightning.round.declared_state import (
    ClientState,
    Coefficient,
    Declaration,
    Exchanged,
    Scratch,
    ServerState,
    Upload,
)
from fl_lightning.round.neighbourhood import Neighbourhood
from fl_lightning.round.partial_training import PartialTraining
from fl_lightning.round.quantization import ordered_norm, ordered_sum
from fl_lightning.round.server import Server
from fl_lightning.sampling import generator
from fl_lightning.schedules import Schedule, arguments
from fl_lightning.storage.secret import Key, drawn_from

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from typing_extensions import Self

__all__ = [
    "CLASS_LABELS",
    "MEAN_GRADIENT",
    "ROUND_RATE",
    "UNIFORM_OPTIMUM",
    "Above",
    "AfterExchange",
    "AtLeast",
    "AtMost",
    "Base",
    "Below",
    "BelowOne",
    "ClientState",
    "Clients",
    "Coefficient",
    "Declaration",
    "Diverged",
    "Exchanged",
    "FederatedCallback",
    "Layout",
    "Neighbourhood",
    "NonNegativeFloat",
    "NonNegativeInt",
    "Note",
    "Paper",
    "Part",
    "PositiveFloat",
    "PositiveInt",
    "Refusal",
    "RunBinding",
    "RunFacts",
    "Schedule",
    "Scratch",
    "Server",
    "ServerState",
    "UnitInterval",
    "Upload",
    "UserError",
    "check",
    "generator",
    "low_rank",
    "ordered_norm",
    "ordered_sum",
    "privacy",
    "refuse_both",
    "suggest",
    "wire",
]

Part = tuple[Tensor, int | None]


@dataclass(frozen=True)
class RunBinding:
    """Facts about a run that its callbacks also have outside of rounds.

    Args:
        seed: the run's.
        steps_of: ``(client, epochs)`` → local steps of so many epochs; None: not known.
        secret: the source of clients' private draws; None: no method needs it.
    """

    seed: int
    steps_of: Callable[[int, float], int] | None = None
    secret: Key | None = None


Role = Literal["method", "measurement", "system"]
# Called with a callback and the name of an attribute that it assigns in a hook.
Assigned = Callable[["FederatedCallback", str], None]


class FederatedCallback(Given, PartialTraining, pl.Callback):
    """Base class of methods and loggers: a Lightning callback with the hooks of a federated round.

    Most methods need four: :meth:`on_local_start`, :meth:`on_local_gradient`, :meth:`on_local_end`
    and :meth:`on_server_update`. Hooks that take ``clients`` may run in several threads at once
    with different clients. Such hooks must not set an attribute of ``self``, synchronise with the
    host or branch on data. If a hook has one owner (its docstring says so), only one callback of a
    run may override it.

    A class declares what it refuses, and so its docstring does not repeat it. The constructor
    raises UserError for an argument that its annotation or its Coefficient does not accept. A run
    raises it before round 0 for a second owner of a hook, for ``cannot_run_with``, for a Refusal of
    ``notes``, and for ``needs_adapters``.

    Example:
        >>> class Proximal(FederatedCallback):
        ...     neutral = {"mu": 0.0}
        ...     mu = Coefficient()
        ...     def __init__(self, mu=0.01):
        ...         super().__init__()
        ...         self.mu = mu
        ...     def on_local_gradient(self, clients, gradient):
        ...         return gradient + self.mu * (clients.x - clients.w)
    """

    neutral: ClassVar[dict[str, Any] | None] = None
    """Arguments with which the method is FedAvg; None if there are none."""

    title: ClassVar[str] = ""
    """The method's name in the literature, for the line that describes the run; empty: the
    class name.
    """

    paper: ClassVar[Paper] = Paper()
    """The papers that it implements, and how they count the communication. The value is a call of
    ``Paper`` with only builtins in it, because the source text is also read without importing the
    class.
    """

    sends: ClassVar[Literal["x", "displacement", ""]] = ""
    """The value that the server can compute from the result of ``transmit``: x_{i,K}, the
    displacement x_{i,K} - x_{i,0}, or neither.
    """

    moves_start: ClassVar[bool] = True
    """Whether ``on_local_start`` changes ``clients.x``. If False, it only prepares the local
    steps. Clients then start at w, so the server knows their displacement from their messages.
    """

    taps: dict[str, str] = {}
    """Modules of the learner whose outputs the method reads, such as
    ``{"logits": "last", "features": "last:in"}``.

    Each name stands for a module's path in the learner: its output, or with ``:in`` its first
    positional input. ``"last"`` is the last module with its own parameters (not counting norms).
    An empty path is the learner. If a step calls a module several times, the last call counts.
    ``taps`` may be set in ``__init__``.
    """

    tolerates_staleness: ClassVar[bool] = False
    """Whether it works if clients train from earlier models, at other rounds than the server's:
    its clients read no sent ServerState, and its server does not read the number of
    participants.
    """

    draws_by_client: ClassVar[bool] = False
    """Whether its random draws or its actions for a client depend on the client's number. Then
    registering the clients in another order gives another result."""

    reads_values: ClassVar[bool] = False
    """Whether its hooks of a local step read a tensor's value. On a GPU such steps are not
    captured."""

    every_round: ClassVar[bool] = False
    """Whether its ``on_round_end`` is called, and its server states are committed, even if no
    client finished. If it has ``aggregate``, the server then also takes its step.
    """

    role: ClassVar[Role] = "method"
    """``"measurement"``: it only measures, and its rows do not count as the method's. ``"system"``:
    it simulates the system on which a run trains: who takes part and how much each client does. A
    run's title names only methods. Only the arguments of methods and systems have to be the same in
    a resumed run."""

    order: ClassVar[int] = 0
    """Its place in ``on_local_start``, ``on_local_gradient``, ``on_local_step_end``, ``on_updates``
    and ``on_server_update``: methods with a smaller number come first. -1: its ``on_updates``
    stands for the clients' actions, or its ``on_local_start`` gives clients their own models. 1: it
    keeps coordinates unchanged in some steps."""

    needs_callbacks: ClassVar[tuple[str, ...]] = ()
    """Class names of other callbacks that have to be in the run."""

    cannot_run_with: dict[str, str] = {}
    """``{hook or class name: reason}``: no other callback of the run may override that hook, or be
    of that class. ``"moves_start"``: no other callback may change the points from which clients
    start. ``"clients.w"``: clients train from this method's own models, so no other hook may read
    ``clients.w``. ``"ServerState"``, ``"Upload"``: no other method may declare one."""

    notes: ClassVar[tuple[Note, ...]] = ()
    """Warnings about a run before it begins."""

    gathers: ClassVar[bool] = False
    """Whether it reads ``server.updates`` elsewhere than in hooks that have the parameter
    ``updates``, and than in ``on_updates``."""

    reads_loss: ClassVar[bool] = False
    """Whether it reads ``clients.loss`` in an ``on_local_end`` without the parameter ``loss``."""

    samples_at_once: int | None = None
    """With ``reduce_samples`` or ``scale_samples``: how many samples' gradients are taken at once.
    None: as many as fit into memory; 1: one after the other."""

    protects_samples: ClassVar[bool] = False
    """Whether what clients send must depend on their samples only by the hooks of single samples'
    gradients: no other method may then read values of samples, such as ``clients.loss`` or
    ``clients.full_gradient``."""

    reads_evaluated: ClassVar[bool] = False
    """Whether it reads ``clients.evaluated``, which sites are sent only then."""

    @property
    def draws_from(self) -> int | Literal["secret"] | None:
        """Return the source of participation's draws and of :meth:`Server.private_generator`.

        ``"secret"``: 32 bytes that only the run knows. An integer: this number takes the place of
        the run's seed, for tests. None: the run is not private.
        """
        return None

    @property
    def clients_draw_from(self) -> int | Literal["secret"] | None:
        """Return the source of :meth:`Clients.private_generator` and :meth:`private_generator`, as
        in ``draws_from``. Participants are drawn from the seed.
        """
        return None

    _declared: dict[str, Declaration]
    _bound_transaction: Any
    _bound_run: RunBinding | None
    _bound_assigned: Assigned | None

    def __new__(cls, /, *args: object, **kwargs: object) -> Self:
        # A subclass may assign attributes before it calls `super().__init__()`, or never call it.
        self: Self = super().__new__(cls, *args, **kwargs)
        bound = dict.fromkeys(("_bound_transaction", "_bound_run", "_bound_assigned"))
        self.__dict__.update(_declared={}, **bound)
        return self

    @classmethod
    def is_method(cls) -> bool:
        """Whether a run is named after it, because it neither only measures nor only simulates."""
        return cls.role == "method"

    @property
    def personal_of_all(self) -> bool:
        """Return whether clients that never finished a round have a ``personal`` model, too.

        They have such a model if the method keeps no client state, which they would lack.
        """
        kept = [each for each in self.declarations().values() if each.keeps_rows]
        return self.has("personal") and not kept

    @property
    def needs_classes(self) -> bool:
        """Return whether ``batch[1]`` has to be class indices, one integer per sample."""
        return CLASS_LABELS in self.notes

    @property
    def blind(self) -> bool:
        """Return whether its ``perturbation`` takes no gradient."""
        return self.has("perturbation") and not takes(self.perturbation, "gradient")

    def asks_for(self, value: str) -> bool:
        """Return whether it asks for ``"loss"``, ``"updates"`` or ``"evaluated"``."""
        return asks_for(self, value)

    def declare(self, name: str, declaration: Declaration) -> None:
        """Declare state in ``__init__``, if it depends on arguments."""
        declaration.name = name
        self._declared[name] = declaration

    def use(self, hook: str, call: Callable[..., Any]) -> None:
        """Give only this instance a hook, if that depends on arguments."""
        vars(self)[hook] = call

    def has(self, hook: str) -> bool:
        """Return whether it overrides a hook, in its class or by :meth:`use`.

        An attribute of that name that cannot be called, such as a state, is not a hook.
        """
        if callable(vars(self).get(hook)):
            return True
        of_class = getattr(type(self), hook)
        return of_class is not getattr(FederatedCallback, hook) and callable(of_class)

    def __getattr__(self, name: str) -> Any:
        declared = self.__dict__.get("_declared", {})
        if name in declared:
            return declared[name].__get__(self, type(self))
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._declared:
            self._declared[name].__set__(self, value)
        elif isinstance(value, Declaration):
            raise UserError(
                f"method: {type(self).__name__} assigns a {type(value).__name__} to self.{name}, "
                f"which declares nothing. Write {name} = … in the class body, or "
                f"self.declare({name!r}, …) in __init__ if it depends on arguments."
            )
        else:
            declared = isinstance(getattr(type(self), name, None), Declaration)
            if self._bound_assigned is not None and not declared:
                self._bound_assigned(self, name)
            super().__setattr__(name, value)

    def declarations(self) -> dict[str, Declaration]:
        """Return all declared state by name, of the class and of this instance."""
        declarations: dict[str, Declaration] = {}
        # Go from the base classes down, so that a subclass may declare a name again.
        for cls in reversed(type(self).__mro__):
            for name, value in vars(cls).items():
                if isinstance(value, Declaration):
                    declarations[name] = value
        declarations |= self._declared
        return {name: declaration.of(self) for name, declaration in declarations.items()}

    @property
    def _transaction(self) -> Any:
        if self._bound_transaction is None:
            raise RuntimeError(
                f"{type(self).__name__}'s declared state can only be read during a run"
            )
        return self._bound_transaction

    @property
    def _run(self) -> RunBinding:
        if self._bound_run is None:
            raise RuntimeError(f"{type(self).__name__} knows a run's seed and data only in a run")
        return self._bound_run

    def generator(self, purpose: str, *counters: int) -> np.random.Generator:
        """Return random numbers keyed by (the run's seed, purpose, counters), in any hook.

        The numbers are the same in every engine and process, and after a resume. Another call with
        the same arguments starts the same numbers again.

        Args:
            purpose: name of the draw; methods that use the same name draw the same numbers.
            counters: up to three, such as the round and the client's number.
        """
        return self._keyed("method: " + purpose, *counters)

    def private_generator(self, purpose: str, *counters: int) -> np.random.Generator:
        """Return random numbers that no reader of the run can compute, such as coins of samples.

        They are keyed by (secret, purpose, counters), or by the seed that ``clients_draw_from``
        gives. For noise use :meth:`Clients.private_generator`.
        """
        key = self._run.secret
        if key is None:
            raise RuntimeError(f"{type(self).__name__} draws from no secret: see clients_draw_from")
        return drawn_from(key, purpose, *counters)

    def steps_of(self, client: int, epochs: float) -> int:
        """Return the local steps of so many epochs of a client, for use in :meth:`steps`."""
        steps_of = self._run.steps_of
        assert steps_of is not None
        return steps_of(client, epochs)

    def _keyed(self, purpose: str, *counters: int) -> np.random.Generator:
        """As :meth:`generator`, for packaged methods, whose purposes are used as keys unchanged."""
        return sampling.generator(self._run.seed, purpose, *counters)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({arguments(self)})"

    def facts(self) -> dict[str, str]:
        """Return entries for the run's card, besides the arguments; called when training begins."""
        return {}

    def announced(self) -> str:
        """Return a line that the run prints before its first round; ``""`` prints nothing."""
        return ""

    def pictures(self) -> dict[str, Figure]:
        """Return figures by name: ``NAME.png`` in the run's folder, and TensorBoard's images."""
        return {}

    def local_batch(self, client: int, batch: Any) -> Any:
        """One owner. Return the batch that a client trains on instead of its own.

        The batch that is returned is used in local steps and full gradients.
        """

    def select(self, server: Server, available: Tensor, n: int) -> Tensor | Sequence[int]:
        """One owner. Choose who takes part: return ``n`` distinct ids of ``available``, in any
        order.

        ``available`` ``(a,)`` is ascending, int64. The hook is called in every process with the
        same values, before everything else in a round; it draws from ``server.generator``. Choices
        are checkpointed. A round in which no client is available has no participants, without a
        call.
        """

    def steps(self, t: int, ids: Tensor) -> Tensor | Sequence[int]:
        """One owner. Return K_i of each client of ``ids`` ``(k,)`` in round t, integers of at least
        1.

        The result depends only on (seed, t, id): draw from :meth:`generator`; you may call
        :meth:`steps_of`. ``ids`` is int64, on the CPU. The hook is called whenever the value is
        needed, also before the round. ``local_epochs`` and ``local_steps`` are then ignored.
        """

    def on_layout(self, layout: Layout) -> None:
        """Called before all other hooks, once the model is known, and after a resume.

        Such a hook sets attributes that depend on the model, such as the sizes in a state's
        ``shape``.
        """

    def on_round_start(self, server: Server) -> None:
        """Called at the server, before any client trains."""

    def broadcast(self, server: Server) -> Tensor:
        """One owner. Return the model ``(D,)`` that clients get as w; called once per round.

        The clients' updates are measured from the model that is returned. Call
        ``server.sent(parameters=…, bytes=…)`` to say how much each participant is sent instead of D
        numbers.
        """

    def on_local_start(self, clients: Clients) -> None:
        """Change or assign ``clients.x`` ``(n, D)``, from which the clients start."""

    def local_output(self, clients: Clients, name: str, value: Any, batch: Any) -> Any:
        """One owner a module. Replace the output of the tapped module.

        Called in each pass of local training, for those of ``taps`` that are outputs.
        """

    def local_loss(
        self, clients: Clients, loss: Tensor, seen: dict[str, Any], batch: Any
    ) -> Tensor:
        """Return the loss, a scalar, that a client's local step minimises instead of ``loss``.

        ``clients`` is one client. ``seen[name]`` is the output of the module ``taps[name]`` in this
        step, with graph, from before any ``local_output``. ``batch`` is the learner's. Methods are
        called one after the other, each with the loss so far; the logged loss stays the learner's.
        The changed loss is used for every gradient: at a perturbed point, and in
        ``clients.gradient_at`` and ``clients.full_gradient``.
        """

    def step_samples(self, client: int, t: int, steps: int) -> Iterable[Sequence[int]]:
        """One owner. Choose each local step's samples: yield their positions, for ``steps`` steps.

        A position counts among the client's N_i samples, as the data's ``client_indices`` orders
        them. A step may take no sample. Draw from :meth:`generator` or :meth:`private_generator`.
        """

    def reduce_samples(self, clients: Clients, gradients: Tensor) -> Tensor:
        """One owner. Reduce the gradients ``(n, b, D)`` of b of a step's samples to ``(n, D)``.

        A step's samples may come in several parts, whose results the run adds up. The sum takes
        the place of the loss gradient, and is 0 if the step has no sample. A sample's gradient is
        that of ``training_step`` on a batch of this one sample, without weight decay.
        """

    def scale_samples(self, clients: Clients, norms: Tensor) -> Tensor:
        """One owner, in place of ``reduce_samples``. Return the factors ``(n, b)`` of b of a step's
        samples, whose gradients have these ``norms`` ``(n, b)``, both float64.

        The sum of the gradients times their factors, in float64, takes the place of the loss
        gradient. A sample whose factor is 0 is left out, also if its gradient is not finite. This
        is faster than ``reduce_samples``, because the gradients of linear layers are not stored.
        """

    def on_samples_reduced(self, clients: Clients, total: Tensor) -> Tensor | None:
        """One owner. Change the sum ``(n, D)`` of a step's parts, float64, in place or as a
        result; no other hook has seen it.
        """

    @may_take("gradient")
    def perturbation(self, clients: Clients) -> Tensor:
        """One owner. Return e ``(n, D)``; the step's loss gradient is taken at x + e.

        If you define ``perturbation(self, clients, gradient)``, the gradient ``(n, D)`` at x is
        taken before, with the same batch and random numbers. You may change and return
        ``gradient``. Its memory is reused, so copy values that you need later.
        """

    def on_loss_gradient(self, clients: Clients, gradient: Tensor) -> Tensor | None:
        """One owner. Mix the loss gradient ``(n, D)`` with others, in place or as a result."""

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Tensor | None:
        """Add a correction to the gradient ``(n, D)``, in place or as a new tensor that you
        return; then it is clipped.
        """

    def precondition(self, clients: Clients, gradient: Tensor) -> Tensor | None:
        """One owner. Return the direction ``(n, D)`` that the client optimizer follows.

        This hook follows clipping, so clipping limits the gradient and not the direction. The
        client optimizer has to be plain SGD: its step is then η (direction + λ x).
        """

    def on_direction(self, clients: Clients, direction: Tensor) -> Tensor | None:
        """One owner. Change the direction of the step ``(n, D)``, in place or as a new tensor that
        you return.

        This hook follows ``precondition``; if no method has that, ``direction`` is the gradient.
        """

    def step_rate(self, clients: Clients) -> Tensor:
        """One owner. Return the factor ``(n, 1)`` of the clients' learning rate in the present
        step.

        ``clients.elapsed`` sums the rates that were used; ``clients.lr`` stays the round's.
        """

    def on_local_step_end(self, clients: Clients) -> None:
        """Called after the client optimizer's step."""

    @may_take("loss")
    def on_local_end(self, clients: Clients) -> None:
        """Called after the last step: ``clients.x`` holds x_{i,K}, read-only.

        If you define ``on_local_end(self, clients, loss)``, the run keeps the mean loss of the
        clients' local steps ``(n, 1)``, which is also ``clients.loss``.
        """

    def transmit(self, clients: Clients, update: Tensor) -> Tensor:
        """One owner. Return the message ``(n, D)`` that clients send instead of x_{i,K} - w."""

    def encode(self, clients: Clients, update: Tensor) -> dict[str, NDArray[Any]]:
        """Return the message of one client as arrays by name, in the bytes that ``transmit``
        counts.

        This hook is for a ``transmit`` owner that sends less than D numbers. ``encode`` does the
        same as ``transmit``, and if called after it returns the same message.
        """

    def decode(self, arrays: dict[str, NDArray[Any]], round: int, client: int) -> Tensor:
        """Return a client's transmitted update ``(D,)``, from only the arrays of ``encode``.

        The result has the same bits. Values that are drawn from the seed are drawn again, and not
        sent.
        """

    def on_updates(self, server: Server) -> None:
        """Change or assign ``server.updates`` ``(n, D)``, which the mean uses, too."""

    @may_take("updates")
    def aggregate(self, server: Server) -> Tensor:
        """One owner. Return the aggregated update ``(D,)``, which replaces the weighted mean.

        If you define ``aggregate(self, server, updates)``, the run gathers each participant's
        update ``(n, D)``, ascending by client, which is also ``server.updates``.
        """

    @may_take("updates")
    def on_server_update(self, server: Server) -> None:
        """Add to the aggregated ``server.update`` ``(D,)``; then the server optimizer steps.

        If you define ``on_server_update(self, server, updates)``, the run gathers the updates, as
        for :meth:`aggregate`.
        """

    def evaluated(self, server: Server) -> Tensor:
        """One owner. Return the model ``(D,)`` that is evaluated and exported after the round.

        ``server.w`` is w^{t+1}, ``server.w_before`` w^t; before round 0 it is w^0.
        """

    def neighbours(self, server: Server) -> Neighbourhood:
        """One owner. Return who sends to whom in this round, and by which weights.

        Called after the server's step, in every process with the same values, if a client finished.
        Such a run has no server: w is the clients' mean, and each has a model of its own.
        """

    def on_exchange(self, clients: AfterExchange) -> None:
        """Called for each client that finished, after it got its neighbours' values.

        An :class:`Exchanged` is now what the client got. ``clients`` has ``ids``, ``round``,
        ``layout``, ``w`` (the new one) and states as the client left them, but no ``x``. What it
        writes is committed. An :class:`Upload` that it assigns can be read in ``on_round_end``.
        """

    def on_round_end(self, server: Server) -> None:
        """Called when the new w is set; staged rows can be read, and changed in place.

        After this hook the round is logged, and all of it is committed at once.
        """

    def parts(self, layout: Layout) -> list[Part]:
        """One owner. Disjoint ``((D,) bool, period in rounds or None: never)`` of averages."""

    def personal(self, clients: Clients) -> Tensor:
        """One owner. Return the model ``(n, D)`` that a client uses itself after a round.

        Without this hook it is w with the client's kept parts. This hook is called for clients that
        have finished a round; the others use w. ``clients`` has ``ids``, ``w``, ``x`` (w with the
        client's kept parts), ``sizes``, ``round``, ``layout`` and committed rows.
        """
