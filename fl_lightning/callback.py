"""A federated method is a callback: hooks in the order of a round, and state that is declared.

Declared state is saved, moved, counted and restored by the framework; a method keeps nothing hidden.
Shapes: ``D`` trainable parameters as one vector, ``n`` clients trained together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import pytorch_lightning as pl
import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.schedules import Schedule

if TYPE_CHECKING:
    from typing_extensions import Self

    from fl_lightning.flat import Layout
    from fl_lightning.rounds import Clients, Round, Server

Initial = Literal["zeros", "initial_model", "current_model"] | Callable[[Tensor], Tensor]
Part = tuple[Tensor, int | None]


class Declaration:
    """State of a method, declared in the class body: ``name = ClientState()``.

    Args:
        shape: of one row; None is ``(D,)``.
        dtype: None is the learner's (sums at least float32).
    """

    def __init__(self, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> None:
        self.shape, self.dtype = shape, dtype
        self.name = ""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def key(self, callback: FederatedCallback) -> str:
        """``"ClassName.name"``: where this is found in checkpoints and in ``client_state``."""
        return f"{type(callback).__name__}.{self.name}"


class _State(Declaration):
    def __init__(
        self,
        initial: Initial = "zeros",
        synchronised: bool | None = None,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(shape, dtype)
        if not callable(initial) and initial not in ("zeros", "initial_model", "current_model"):
            raise UserError(
                f"initial={initial!r} is not known; accepted are 'zeros', 'initial_model' (w^0), 'current_model' "
                "(w^t when first read), or a function of w."
            )
        self.initial, self.synchronised = initial, synchronised


class ClientState(_State):
    """Kept per client: ``self.name[clients]`` → rows ``(n, *shape)``, the same storage each time within a round.

    Assignments copy into the rows; a client's row exists once written and is committed at the end of the round.

    Args:
        initial: what a client without a row reads: ``"zeros"``, ``"initial_model"`` (w^0), ``"current_model"``
            (w^t when first read), or a function of w^t ``(D,)``.
        synchronised: under partial averaging, True: coordinates not averaged this round keep their old value.
    """

    @overload
    def __get__(self, callback: None, owner: type) -> Self: ...
    @overload
    def __get__(self, callback: FederatedCallback, owner: type) -> ClientRows: ...
    def __get__(self, callback: FederatedCallback | None, owner: type) -> Self | ClientRows:
        return self if callback is None else ClientRows(callback, self)

    def __set__(self, callback: FederatedCallback, value: object) -> None:
        raise AttributeError(f"{self.key(callback)} is kept per client: assign {self.name}[clients] = …")


class Scratch(Declaration):
    """Rows ``self.name[clients]`` that live for one round, zeros at its start; not saved, not sent."""

    initial: Initial = "zeros"
    synchronised: bool | None = False

    @overload
    def __get__(self, callback: None, owner: type) -> Self: ...
    @overload
    def __get__(self, callback: FederatedCallback, owner: type) -> ClientRows: ...
    def __get__(self, callback: FederatedCallback | None, owner: type) -> Self | ClientRows:
        return self if callback is None else ClientRows(callback, self)

    def __set__(self, callback: FederatedCallback, value: object) -> None:
        raise AttributeError(f"{self.key(callback)} has a row a client: assign {self.name}[clients] = …")


class ServerState(_State):
    """Kept by the server: ``self.name`` → tensor, assigned or changed in place in hooks that take ``server`` alone.

    Args:
        initial: as for :class:`ClientState`.
        sent: counted as sent to each participant in each round.
        synchronised: as for :class:`ClientState`.
    """

    def __init__(
        self,
        initial: Initial = "zeros",
        sent: bool = False,
        synchronised: bool | None = None,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(initial, synchronised, shape, dtype)
        self.sent = sent

    @overload
    def __get__(self, callback: None, owner: type) -> Self: ...
    @overload
    def __get__(self, callback: FederatedCallback, owner: type) -> Tensor: ...
    def __get__(self, callback: FederatedCallback | None, owner: type) -> Self | Tensor:
        return self if callback is None else callback._round.server_state(self.key(callback), self)

    def __set__(self, callback: FederatedCallback, value: Tensor) -> None:
        callback._round.set_server_state(self.key(callback), self, value)


class Upload(Declaration):
    """Given by each participant in ``on_local_end``: ``self.name[clients] = …``; the server reads sums of it.

    Args:
        sent: True: counted as sent. ``"derived"``: the server can compute it from x_{i,K} - x_{i,0} and K_i, so it is
            counted only where clients start elsewhere than w and the displacement is not what they send.
            ``"derived from x"``: from x_{i,K} and w, counted only where x_{i,K} is not what they send. False: never.
    """

    def __init__(
        self,
        sent: bool | Literal["derived", "derived from x"] = True,
        shape: tuple[int, ...] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(shape, dtype)
        self.sent = sent

    @overload
    def __get__(self, callback: None, owner: type) -> Self: ...
    @overload
    def __get__(self, callback: FederatedCallback, owner: type) -> Uploads: ...
    def __get__(self, callback: FederatedCallback | None, owner: type) -> Self | Uploads:
        return self if callback is None else Uploads(callback, self)

    def __set__(self, callback: FederatedCallback, value: object) -> None:
        raise AttributeError(f"{self.key(callback)} is given by each client: assign {self.name}[clients] = …")


class ClientRows:
    """What ``self.name`` of a :class:`ClientState` or :class:`Scratch` is: rows by ``[clients]``."""

    def __init__(self, callback: FederatedCallback, declaration: ClientState | Scratch) -> None:
        self._callback, self._declaration = callback, declaration

    def __getitem__(self, clients: Clients) -> Tensor:
        return clients.rows(self._declaration.key(self._callback), self._declaration)

    def __setitem__(self, clients: Clients, value: Tensor) -> None:
        clients.write(self._declaration.key(self._callback), self._declaration, value)

    def staged(self, server: Server) -> Iterator[tuple[Tensor, Tensor]]:
        """``(ids, rows)`` written this round, ascending by client, the same in every process; in ``on_round_end``."""
        return server.staged(self._declaration.key(self._callback))


class Uploads:
    """What ``self.name`` of an :class:`Upload` is: given by ``[clients] =``, read as a mean or sum by the server."""

    def __init__(self, callback: FederatedCallback, declaration: Upload) -> None:
        self._callback, self._declaration = callback, declaration

    def __setitem__(self, clients: Clients, value: Tensor) -> None:
        clients.upload(self._declaration.key(self._callback), self._declaration, value)

    def sum(self) -> Tensor:
        """Σ over the clients that finished."""
        return self._total()[0]

    def mean(self) -> Tensor:
        """The uniform mean over the clients that finished."""
        total, n = self._total()
        return total / max(n, 1)

    def weighted(self) -> Tensor:
        """Σ p_i over the clients that finished."""
        return self._callback._round.uploaded_weighted(self._declaration.key(self._callback), self._declaration)

    def _total(self) -> tuple[Tensor, int]:
        return self._callback._round.uploaded(self._declaration.key(self._callback), self._declaration)


class Coefficient:
    """A method's number, or :class:`~fl_lightning.schedules.Schedule` of it: ``mu = Coefficient()`` in the class body.

    Reading gives this round's value. Anything else is refused with the name, the value and what is accepted.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, callback: FederatedCallback | None, owner: type) -> Any:
        if callback is None:
            return self
        value = callback.__dict__[self.name]
        return callback._round.coefficient(value) if isinstance(value, Schedule) else value

    def __set__(self, callback: FederatedCallback, value: float | Schedule) -> None:
        number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        if not number and not isinstance(value, Schedule):
            raise UserError(
                f"{type(callback).__name__}: {self.name}={value!r} is not a number; accepted are a finite number or a "
                f"schedule, for example {self.name}=0.1 or Exponential(0.99)."
            )
        callback.__dict__[self.name] = value


class FederatedCallback(pl.Callback):
    """Base class of methods and loggers: a Lightning callback with the hooks of a federated round.

    Most methods need four: :meth:`on_local_start`, :meth:`on_local_gradient`, :meth:`on_local_end` and
    :meth:`on_server_update`. Hooks that take ``clients`` may run in several threads at once with different clients:
    they set no attribute of ``self``, do not synchronise with the host and do not branch on data. A hook with one owner
    (perturbation, on_loss_gradient, transmit, aggregate, parts) can be overridden by one callback of a run only.

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
    """Whether ``on_local_start`` changes ``clients.x``. False: it prepares the local steps alone, and starting at w,
    the server knows the clients' displacement from what they send."""

    _declared: dict[str, Declaration]
    _bound_round: Round | None

    def __new__(cls, *args: object, **kwargs: object) -> Self:
        self = super().__new__(cls)
        self.__dict__.update(_declared={}, _bound_round=None)
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
            self._declared[name].__set__(self, value)  # type: ignore[attr-defined]
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
    def _round(self) -> Round:
        if self._bound_round is None:
            raise RuntimeError(f"{type(self).__name__}'s declared state can be read during a run alone")
        return self._bound_round

    def on_round_start(self, server: Server) -> None:
        """At the server, before any client."""

    def on_local_start(self, clients: Clients) -> None:
        """``clients.x`` ``(n, D)`` holds what the clients start from; change it in place or assign it."""

    def perturbation(self, clients: Clients, gradient: Tensor) -> Tensor:
        """One owner. The loss gradient is taken again at x + the returned ``(n, D)``: same batch, same randomness.

        ``gradient`` may be changed and returned; its memory is used again, so keep a copy, if anything.
        """
        raise NotImplementedError

    def on_loss_gradient(self, clients: Clients, gradient: Tensor) -> Tensor | None:
        """One owner. The gradient of the loss ``(n, D)``, to mix: in place, or return the new one."""

    def on_local_gradient(self, clients: Clients, gradient: Tensor) -> Tensor | None:
        """Add a correction to the gradient ``(n, D)``: in place, or return the new one. Then clipping, optimizer."""

    def on_local_step_end(self, clients: Clients) -> None:
        """After the client optimizer's step."""

    def on_local_end(self, clients: Clients) -> None:
        """``clients.x`` holds x_{i,K}, read-only."""

    def transmit(self, clients: Clients, update: Tensor) -> Tensor:
        """One owner. What the clients send ``(n, D)`` instead of x_{i,K} - w."""
        raise NotImplementedError

    def aggregate(self, server: Server) -> Tensor:
        """One owner. ``(D,)`` in place of the weighted mean of what was transmitted."""
        raise NotImplementedError

    def on_server_update(self, server: Server) -> None:
        """``server.update`` ``(D,)`` is the aggregated update; add to it. Then the server optimizer steps."""

    def on_round_end(self, server: Server) -> None:
        """The new w is in place; staged rows can be read. Then everything is committed at once, then logged."""

    def parts(self, layout: Layout) -> list[Part]:
        """One owner. Disjoint ``((D,) bool, period)``: coordinates averaged every ``period`` rounds (None: never)."""
        raise NotImplementedError
