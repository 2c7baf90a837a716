"""A federated method is a callback: hooks in the order of a round, and state that is declared.

Declared state is saved, moved, counted and restored by the framework; a method keeps nothing
hidden.
Shapes: ``D`` trainable parameters as one vector, ``n`` clients trained together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from fl_lightning.errors import UserError, suggest
from fl_lightning.learner import Layout
from fl_lightning.lightning import pl
from fl_lightning.round.clients import Clients
from fl_lightning.round.server import Server
from fl_lightning.round.sums import ordered_norm, ordered_sum
from fl_lightning.sampling import generator
from fl_lightning.schedules import Schedule
from fl_lightning.state import (
    ClientState,
    Coefficient,
    Declaration,
    Scratch,
    ServerState,
    Staging,
    Upload,
)

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "UNIFORM_OPTIMUM",
    "ClientState",
    "Clients",
    "Coefficient",
    "Declaration",
    "FederatedCallback",
    "Layout",
    "Note",
    "Part",
    "RunFacts",
    "Schedule",
    "Scratch",
    "Server",
    "ServerState",
    "Upload",
    "UserError",
    "generator",
    "ordered_norm",
    "ordered_sum",
    "suggest",
]

Part = tuple[Tensor, int | None]


@dataclass(frozen=True)
class RunFacts:
    """What a :class:`Note` may depend on: ``n`` of ``m`` clients a round, ``weighting`` as it was
    given.

    ``optimizer``: the clients', where a step is not its gradient times the learning rate; empty
    where it is.
    """

    n: int
    m: int
    weighting: str
    optimizer: str = ""


class Note:
    """Something to say about a run before it begins: a warning where it applies, repeated in the
    run's card.

    Args:
        text: may refer, in braces, to attributes of the method, of :class:`RunFacts` and to
            ``values``.
        when: whether it applies to a method in a run.
        values: further names for the text, each a function of the method and the run.
    """

    def __init__(
        self,
        text: str,
        when: Callable[[Any, RunFacts], bool],
        **values: Callable[[Any, RunFacts], object],
    ) -> None:
        self.text = text
        self.when = when
        self.values = values

    def about(self, method: FederatedCallback, run: RunFacts) -> str:
        """The text for this method and run; empty where it does not apply."""
        if not self.when(method, run):
            return ""
        values = {name: value(method, run) for name, value in self.values.items()}
        return f"{type(method).__name__}: " + self.text.format(
            **{**vars(method), **vars(run), **values}
        )


UNIFORM_OPTIMUM = Note(
    "its fixed point is the optimum of the uniform mean over clients, also with "
    "weighting='samples'.",
    when=lambda method, run: run.weighting == "samples",
)


class FederatedCallback(pl.Callback):
    """Base class of methods and loggers: a Lightning callback with the hooks of a federated round.

    Most methods need four: :meth:`on_local_start`, :meth:`on_local_gradient`, :meth:`on_local_end`
    and :meth:`on_server_update`. Hooks that take ``clients`` may run in several threads at once
    with different clients: they set no attribute of ``self``, do not synchronise with the host and
    do not branch on data. A hook with one owner (it says so) may be overridden by only one callback
    of a run.

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
    """Arguments with which the method is FedAvg; None where there are none."""

    title: ClassVar[str] = ""
    """The method's name in the field, for the line that says what runs; empty: the class name."""

    sends: ClassVar[Literal["x", "displacement", ""]] = ""
    """What the server can compute from what ``transmit`` sends: x_{i,K}, x_{i,K} - x_{i,0}, or neither."""

    moves_start: ClassVar[bool] = True
    """Whether ``on_local_start`` changes ``clients.x``. False: it only prepares the local steps; clients then start at
    w, so that the server knows their displacement from what they send."""

    reads_loss: ClassVar[bool] = False
    """Whether ``clients.loss`` is asked for."""

    requires: ClassVar[dict[str, Any]] = {}
    """Arguments of FederatedModule without which it refuses to run; the contracts run with them."""

    aggregates_nobody: ClassVar[bool] = False
    """Whether ``aggregate``, ``on_server_update`` and the server's step come where no client finished, too."""

    gathers: ClassVar[bool] = False
    """Whether ``server.updates`` is asked for, beside :meth:`aggregate`: all participants' updates in one place."""

    stands_for_clients: ClassVar[bool] = False
    """Whether its ``on_updates`` changes what clients send: it then comes before what the server does to updates."""

    rests: ClassVar[bool] = False
    """Whether it keeps coordinates at rest in some steps: its hooks of a step then come after those of all others."""

    cannot_run_with: ClassVar[dict[str, str]] = {}
    """``{hook or class name: reason}``: what another callback of the run must not override, or must not be."""

    notes: ClassVar[tuple[Note, ...]] = ()
    """What the method has to say about a run before it begins."""

    @property
    def draws_from(self) -> int | Literal["secret"] | None:
        """What the coins of participation and :meth:`Server.private_generator` are drawn from, in a
        private run.

        ``"secret"``: 32 bytes of the run that nobody else knows. An integer: as if it were the
        run's seed, for tests.
        None: the run is not private.
        """
        return None

    _declared: dict[str, Declaration]
    _bound_ledger: Staging | None

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        self = super().__new__(cls)
        self.__dict__.update(_declared={}, _bound_ledger=None)
        return self

    def declare(self, name: str, declaration: Declaration) -> None:
        """Declare state in ``__init__``, where it depends on arguments."""
        declaration.name = name
        self._declared[name] = declaration

    def __getattr__(self, name: str) -> Any:
        declared = self.__dict__.get("_declared", {})
        if name in declared:
            return declared[name].__get__(self, type(self))
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._declared:
            self._declared[name].__set__(self, value)
        else:
            super().__setattr__(name, value)

    def declarations(self) -> dict[str, Declaration]:
        """All declared state by name, of the class and of this instance."""
        of_class = {
            name: value
            for cls in reversed(type(self).__mro__)
            for name, value in vars(cls).items()
            if isinstance(value, Declaration)
        }
        return {**of_class, **self._declared}

    @property
    def _ledger(self) -> Staging:
        if self._bound_ledger is None:
            raise RuntimeError(
                f"{type(self).__name__}'s declared state can only be read during a run"
            )
        return self._bound_ledger

    def facts(self) -> dict[str, str]:
        """What the run's card says of it, besides its arguments; asked for when rounds are about to
        begin.
        """
        return {}

    def local_batch(self, client: int, batch: Any) -> Any:
        """One owner. What a client trains on, in local steps and full gradients, in place of a
        batch of its own.
        """
        raise NotImplementedError  # one owner: called only on a callback that overrides it

    def select(self, server: Server, available: Tensor, n: int) -> Tensor | Sequence[int]:
        """One owner. Who takes part: ``n`` distinct ids of ``available`` ``(a,)``, ascending,
        int64, in any order.

        Called in every process with the same values, before all else of a round; what it draws
        comes from ``server.generator``. Choices are checkpointed.
        """
        raise NotImplementedError  # one owner: called only on a callback that overrides it

    def on_round_start(self, server: Server) -> None:
        """At the server, before any client trains."""

    def on_local_start(self, clients: Clients) -> None:
        """``clients.x`` ``(n, D)`` holds what the clients start from; change it in place or assign
        it.
        """

    def perturbation(self, clients: Clients, gradient: Tensor) -> Tensor:
        """One owner. The loss gradient is taken again at x + the returned ``(n, D)``: same batch,
        same randomness.

        ``gradient`` may be changed and returned; its memory is reused, so keep a copy of what is
        needed later.
        """
        raise NotImplementedError  # one owner: called only on a callback that overrides it

    def on_loss_gradient(self, clients: Clients, gradient: Tensor) -> Tensor | None:
        """One owner. Mix the gradient of the loss ``(n, D)`` with others: in place, or return the
        new one.
        """

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Tensor | None:
        """Add a correction to the gradient ``(n, D)``: in place, or return the new one. Clipping
        comes next.
        """

    def on_local_step_end(self, clients: Clients) -> None:
        """After the client optimizer's step."""

    def on_local_end(self, clients: Clients) -> None:
        """``clients.x`` holds x_{i,K}, read-only."""

    def transmit(self, clients: Clients, update: Tensor) -> Tensor:
        """One owner. What the clients send ``(n, D)`` instead of x_{i,K} - w."""
        raise NotImplementedError  # one owner: called only on a callback that overrides it

    def on_updates(self, server: Server) -> None:
        """``server.updates`` ``(n, D)``, what was transmitted: change or assign it. The mean uses
        it, too.
        """

    def aggregate(self, server: Server) -> Tensor:
        """One owner. ``(D,)`` in place of the weighted mean of what was transmitted.

        With ``gathers = True`` in the class, ``server.updates`` ``(n, D)`` has each participant's,
        ascending by client.
        """
        raise NotImplementedError  # one owner: called only on a callback that overrides it

    def on_server_update(self, server: Server) -> None:
        """``server.update`` ``(D,)`` is the aggregated update; add to it. Then the server optimizer
        steps.
        """

    def on_round_end(self, server: Server) -> None:
        """The new w is in place; staged rows can be read. Then the round is logged, and all of it
        committed at once.
        """

    def parts(self, layout: Layout) -> list[Part]:
        """One owner. Disjoint ``((D,) bool, period)``: coordinates averaged every ``period`` rounds
        (None: never).
        """
        raise NotImplementedError  # one owner: called only on a callback that overrides it

    def personal(self, clients: Clients) -> Tensor:
        """One owner. What a client uses itself ``(n, D)``, after a round; without it w with its own
        kept parts.

        Asked for clients that have finished a round, the others use w. There are ``ids``, ``w``,
        ``x`` (w with the client's kept parts), ``sizes``, ``round``, ``layout`` and committed rows.
        """
        raise NotImplementedError  # one owner: called only on a callback that overrides it
