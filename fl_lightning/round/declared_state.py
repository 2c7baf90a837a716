"""A method declares in its class body the state that it keeps and sends.

The framework saves, moves, counts and restores this state.
Shapes: ``D`` trainable parameters as one vector, ``n`` clients trained together.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, overload

import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.learner.layout import Layout
from fl_lightning.schedules import LARGEST, Schedule

if TYPE_CHECKING:
    from typing_extensions import Self

# Shape of one row. A name stands for an attribute of the callback, "D" for the number of
# parameters.
Shape = tuple[int | str, ...]
Initial = Literal["zeros", "initial_model", "current_model"] | Callable[[Tensor], Tensor | float]


class Staging(Protocol):
    """The round's transaction, in the form that declarations use."""

    @property
    def t(self) -> int: ...
    @property
    def w(self) -> Tensor: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def trained_by_all(self) -> Tensor | None: ...
    def server_state(self, key: str, declaration: Declaration) -> Tensor: ...
    def set_server_state(self, key: str, declaration: Declaration, value: Tensor) -> None: ...
    def uploaded(self, key: str, declaration: Upload) -> tuple[Tensor, int]: ...
    def uploaded_weighted(self, key: str, declaration: Upload) -> Tensor: ...
    def refuse_outsiders(self, what: str) -> None: ...


class Owner(Protocol):
    """The callback that declares the state."""

    @property
    def role(self) -> str: ...

    @property
    def _transaction(self) -> Staging: ...
    def has(self, hook: str) -> bool: ...
    def declarations(self) -> dict[str, Declaration]: ...


class GroupLike(Protocol):
    """Clients that train together."""

    def read(self, key: str, declaration: PerClient) -> Tensor: ...
    def write(self, key: str, declaration: PerClient, value: Tensor) -> None: ...
    def upload(self, key: str, declaration: Upload, value: Tensor) -> None: ...


class ClientsLike(Protocol):
    """A group of clients, in the form that hooks see."""

    @property
    def _group(self) -> GroupLike: ...


class Staged(Protocol):
    """The server."""

    def committed(
        self, key: str, declaration: Declaration, ids: Tensor | Sequence[int]
    ) -> Tensor: ...
    def staged(self, key: str, declaration: Declaration) -> Iterator[tuple[Tensor, Tensor]]: ...


class Start(Protocol):
    """The facts of a round with which state begins."""

    @property
    def w(self) -> Tensor: ...
    @property
    def initial_model(self) -> Tensor: ...


class Declaration:
    """State of a method, declared in the class body: ``name = ClientState()``.

    This class and its subclasses define all that differs between kinds of state, so no other file
    of the core treats kinds differently. A new kind is a subclass in this file, exported by
    ``callback.py``.

    ``keeps_rows``: whether rows of clients outlive the round. ``at_server``: whether it belongs to
    the server, in one copy. ``summed``: whether the server reads sums of this state over clients.

    Args:
        shape: shape of one row; None: ``(D,)``; ``("k", "D")``: k rows of D numbers, where k is an
            attribute of the callback, set in ``__init__`` or in ``on_layout``.
        dtype: None: the learner's (sums have at least float32).
    """

    keeps_rows: ClassVar[bool] = False
    at_server: ClassVar[bool] = False
    summed: ClassVar[bool] = False
    initial: Initial = "zeros"
    # Under partial averaging, whether coordinates that are not averaged keep their old value. None:
    # the method does not say, but must.
    synchronised: bool | None = False

    def __init__(self, shape: Shape | None = None, dtype: torch.dtype | None = None) -> None:
        self.shape = shape
        # The names in the shape, which `of` replaces by numbers.
        self.names = {size for size in shape or () if isinstance(size, str)}
        self.dtype = dtype
        self.name = ""

    def goes_up(self, known: Collection[str]) -> bool:
        """Return whether clients' values are sent to the server, and counted.

        ``known``: values that the server can compute from updates: ``"x"``, ``"displacement"``.
        """
        return False

    @property
    def comes_from_sites(self) -> bool:
        """Return whether clients' values are sent from their sites to the server."""
        return self.goes_up(())

    @property
    def goes_down(self) -> Literal["counted", "known", ""]:
        """Return whether participants get it; ``"known"``: it is not counted."""
        return ""

    @property
    def by_coordinate(self) -> bool:
        """Return whether only its numbers for averaged coordinates are sent."""
        return False

    def bytes(self, w: Tensor) -> int:
        """Return the bytes of a whole value in a run with this model."""
        size = (self.dtype or w.dtype).itemsize
        return size * math.prod(self.sized(w.numel()))

    def zeros(self, w: Tensor) -> Tensor:
        """Return a value of zeros in a run with this model."""
        size = self.sized(w.numel())
        return torch.zeros(size, dtype=self.dtype or w.dtype, device=w.device)

    def first(self, round: Start) -> Tensor:
        """Return the value before it was ever written; with several rows it is the value of
        each.
        """
        if self.initial == "zeros":
            return self.zeros(round.w)
        if callable(self.initial):
            value = self.initial(round.w)
        elif self.initial == "initial_model":
            value = round.initial_model
        else:
            value = round.w
        # Without a dtype a number would first be rounded to single precision.
        number = None if isinstance(value, Tensor) else self.dtype or round.w.dtype
        first = torch.as_tensor(value, device=round.w.device, dtype=number)
        first = first.to(self.dtype or round.w.dtype)
        return first.expand(self.sized(round.w.numel()))

    def settled(self, value: Tensor, old: Callable[[], Tensor], averaged: Tensor | None) -> Tensor:
        """Return the value that is committed.

        Synchronised state keeps its old value on parts not averaged; with k rows of D numbers
        this holds for each row. ``averaged``: ``(D,)`` bool; None: all is averaged.
        """
        if averaged is None or not self.synchronised or value.shape[-1:] != averaged.shape:
            return value
        return torch.where(averaged, value, old())

    def summed_as(self, default: torch.dtype) -> torch.dtype:
        """Return the dtype of its sums, at least float32 for floats; ``default``: the learner's."""
        dtype = self.dtype or default
        return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def of(self, callback: Owner) -> Self:
        """Return the declaration with the callback's numbers instead of their names in
        ``shape``.
        """
        names = [size for size in self.shape or () if isinstance(size, str) and size != "D"]
        if self.shape is None or not names:
            return self
        sizes: dict[str, int] = {}
        for name in names:
            size = vars(callback).get(name)
            if size is None and callback.has("on_layout"):
                return self  # the size depends on the model, which is not known yet
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UserError(
                    f"{self.key(callback)}: shape={self.shape!r} names {name!r}, which is "
                    f"{size!r}; it has to be an attribute that __init__ or on_layout sets to an "
                    "integer from 1."
                )
            sizes[name] = size
        own = copy.copy(self)
        own.shape = tuple(sizes.get(str(size), size) for size in self.shape)
        return own

    def sized(self, numbers: int) -> tuple[int, ...]:
        """Return the shape of a row if the model has so many parameters."""
        if self.shape is None:
            return (numbers,)
        return tuple(numbers if size == "D" else int(size) for size in self.shape)

    def __set__(self, callback: Any, value: Any) -> None:
        raise AttributeError(
            f"{self.key(callback)} has one row per client: assign {self.name}[clients] = …"
        )

    def key(self, callback: object) -> str:
        """Return ``"ClassName.name"``: its name in checkpoints and for ``client_state``."""
        return f"{type(callback).__name__}.{self.name}"


class State(Declaration):
    """Base class of state that outlives a round."""

    def __init__(
        self,
        initial: Initial = "zeros",
        synchronised: bool | None = None,
        shape: Shape | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(shape, dtype)
        if not callable(initial) and initial not in ("zeros", "initial_model", "current_model"):
            raise UserError(
                f"initial={initial!r} is not known; accepted are 'zeros', 'initial_model' (w^0), "
                "'current_model' (w^t when first read), or a function of w."
            )
        self.initial = initial
        self.synchronised = synchronised


class PerClient(Declaration):
    """State that is read as rows, ``self.name[clients]``."""

    @overload
    def __get__(self, callback: None, owner: type) -> Self: ...
    @overload
    def __get__(self, callback: Owner, owner: type) -> StateRows: ...
    def __get__(self, callback: Owner | None, owner: type) -> Self | StateRows:
        return self if callback is None else StateRows(callback, self.of(callback))


class ClientState(State, PerClient):
    """State of each client: ``self.name[clients]`` → rows ``(n, *shape)``.

    Within a round the rows have the same storage each time, and assignments copy into it. A client
    has a row after it was first written; the row is committed at the end of the round.

    Args:
        initial: the value for a client without a row: ``"zeros"``, ``"initial_model"`` (w^0),
            ``"current_model"`` (w^t when first read), or a function of w^t ``(D,)``.
        synchronised: with True, coordinates that partial averaging does not average in this round
            keep their old value.
        reported: the client's value is sent with its update, and counted: the server reads the
            rows, also if clients are at sites. ``"known"``: it is sent from sites, but not counted,
            because the server could compute it from other messages. Over sites a client writes such
            a state in each of its rounds.
        least: the smallest number that the server accepts from a site in a reported row.
    """

    keeps_rows = True

    def __init__(
        self,
        initial: Initial = "zeros",
        synchronised: bool | None = None,
        shape: Shape | None = None,
        dtype: torch.dtype | None = None,
        reported: bool | Literal["known"] = False,
        least: float | None = None,
    ) -> None:
        super().__init__(initial, synchronised, shape, dtype)
        self.reported = reported
        self.least = least

    def goes_up(self, known: Collection[str]) -> bool:
        return self.reported is True

    @property
    def comes_from_sites(self) -> bool:
        return self.reported == "known" or super().comes_from_sites


class Scratch(PerClient):
    """Rows ``self.name[clients]`` of one round, zeros at its start; they are neither saved nor
    sent.
    """


class ServerState(State):
    """State of the server: ``self.name`` → tensor.

    Only hooks that take ``server`` may assign it or change it in place.

    Args:
        initial: as in :class:`ClientState`.
        sent: counts as sent to each participant in each round; ``"known"``: sent to sites, but not
            counted, because clients could compute it.
        synchronised: as in :class:`ClientState`.
    """

    at_server = True

    def __init__(
        self,
        initial: Initial = "zeros",
        sent: bool | str = False,
        synchronised: bool | None = None,
        shape: Shape | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(initial, synchronised, shape, dtype)
        self.sent = sent

    @property
    def goes_down(self) -> Literal["counted", "known", ""]:
        if self.sent == "known":
            return "known"
        return "counted" if self.sent else ""

    @property
    def by_coordinate(self) -> bool:
        return self.shape is None

    @overload
    def __get__(self, callback: None, owner: type) -> Self: ...
    @overload
    def __get__(self, callback: Owner, owner: type) -> Tensor: ...
    def __get__(self, callback: Owner | None, owner: type) -> Self | Tensor:
        if callback is None:
            return self
        key = self.key(callback)
        declared = callback.declarations().values() if callback.role == "measurement" else ()
        # A logger may keep values that it sums over clients, without noise.
        if any(each.summed for each in declared):
            callback._transaction.refuse_outsiders(key)
        return callback._transaction.server_state(key, self.of(callback))

    def __set__(self, callback: Owner, value: Tensor) -> None:
        callback._transaction.set_server_state(self.key(callback), self.of(callback), value)


class Upload(Declaration):
    """A value of each participant: assign ``self.name[clients] = …`` in ``on_local_end``.

    The server reads sums of such a state.

    Args:
        sent: True: the state counts as sent. ``"derived"``: the server can compute it from
            x_{i,K} - x_{i,0} and K_i. So it is counted only if clients start from a point other
            than w and do not send the displacement itself. ``"derived from x"``: from x_{i,K} and
            w, so it is counted only if clients send something else. False: never.
        least, most: the smallest and largest value that a client can have, such as 0 for a square.
            The server does not accept a site's value beyond them.
    """

    summed = True

    def __init__(
        self,
        sent: bool | Literal["derived", "derived from x"] = True,
        shape: Shape | None = None,
        dtype: torch.dtype | None = None,
        least: float | None = None,
        most: float | None = None,
    ) -> None:
        super().__init__(shape, dtype)
        self.sent = sent
        self.least = least
        self.most = most

    def goes_up(self, known: Collection[str]) -> bool:
        source = {"derived": "displacement", "derived from x": "x"}
        return bool(self.sent) and source.get(str(self.sent)) not in known

    @property
    def by_coordinate(self) -> bool:
        return self.shape is None

    @overload
    def __get__(self, callback: None, owner: type) -> Self: ...
    @overload
    def __get__(self, callback: Owner, owner: type) -> UploadSums: ...
    def __get__(self, callback: Owner | None, owner: type) -> Self | UploadSums:
        return self if callback is None else UploadSums(callback, self.of(callback))


class StateRows:
    """``self.name`` of a :class:`ClientState` or :class:`Scratch`, with rows by ``[clients]``."""

    def __init__(self, callback: Owner, declaration: PerClient) -> None:
        self._key = declaration.key(callback)
        self._declaration = declaration

    def __getitem__(self, clients: ClientsLike) -> Tensor:
        if not hasattr(clients, "_group"):
            name = self._key.rpartition(".")[2]
            raise TypeError(
                f"{self._key}[clients] takes the clients of a hook. In a hook that takes server, "
                f"self.{name}.rows(server, ids) are committed rows, and self.{name}.staged(server) "
                "those of this round"
            )
        return clients._group.read(self._key, self._declaration)

    def __setitem__(self, clients: ClientsLike, value: Tensor) -> None:
        clients._group.write(self._key, self._declaration, value)

    def staged(self, server: Staged) -> Iterator[tuple[Tensor, Tensor]]:
        """Return ``(ids, rows)`` that were written in this round, ascending; for ``on_round_end``.

        The rows are the same in every process.
        """
        return server.staged(self._key, self._declaration)

    def rows(self, server: Staged, ids: Tensor | Sequence[int]) -> Tensor:
        """Return committed rows ``(k, …)`` of these clients, in hooks that take ``server``.

        The rows are the same in every process. A client without a row has the initial value. Rows
        that this round writes are not included; see :meth:`staged`.
        """
        if not self._declaration.keeps_rows:
            raise TypeError(
                f"{self._declaration.name} exists for one round only, and has no committed rows. "
                "Use a ClientState"
            )
        return server.committed(self._key, self._declaration, ids)


class UploadSums:
    """``self.name`` of an :class:`Upload`: clients assign to it, and the server reads its mean
    or sum.
    """

    def __init__(self, callback: Owner, declaration: Upload) -> None:
        self._callback = callback
        self._key = declaration.key(callback)
        self._declaration = declaration

    def __setitem__(self, clients: ClientsLike, value: Tensor) -> None:
        clients._group.upload(self._key, self._declaration, value)

    def sum(self) -> Tensor:
        """Return Σ over the clients that finished."""
        return self._total()[0]

    def mean(self) -> Tensor:
        """Return the uniform mean over the clients that finished."""
        total, n = self._total()
        return total / max(n, 1)

    def weighted(self) -> Tensor:
        """Return the p_i-weighted mean over the clients that finished."""
        return self._callback._transaction.uploaded_weighted(self._key, self._declaration)

    def _total(self) -> tuple[Tensor, int]:
        return self._callback._transaction.uploaded(self._key, self._declaration)


class Coefficient:
    """A number of a method, or a schedule of one: ``mu = Coefficient()`` in the class body.

    Reading it gives this round's value. The value has to be a finite number in single precision, or
    a :class:`~fl_lightning.schedules.Schedule`.

    Args:
        above, below: bounds, which the value itself may not reach; a schedule's value is checked in
            each round.
        least: the smallest allowed value.
        infinite: whether inf is also allowed.
    """

    def __init__(
        self,
        above: float | None = None,
        below: float | None = None,
        infinite: bool = False,
        least: float | None = None,
    ) -> None:
        self.least = least
        self.above = above
        self.below = below
        self.infinite = infinite

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, callback: Any, owner: type) -> Any:
        if callback is None:
            return self
        value = callback.__dict__[self.name]
        if not isinstance(value, Schedule):
            return value
        # A schedule may leave its bounds in any round, so it is checked when it is read.
        number = float(value(callback._transaction.t))
        self._check(callback, number, f"{value!r}, {number:g} in round {callback._transaction.t},")
        return number

    def __set__(self, callback: Any, value: float | Schedule) -> None:
        if not isinstance(value, Schedule):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not self._is_possible(value):
                raise UserError(
                    f"{type(callback).__name__}: {self.name}={value!r} is not a number in single "
                    "precision; accepted are a finite number or a schedule, for example "
                    f"{self.name}=0.1 or Exponential(0.99)."
                )
            self._check(callback, value, repr(value))
        callback.__dict__[self.name] = value

    def _is_possible(self, value: float) -> bool:
        return abs(value) <= LARGEST or (self.infinite and value == math.inf)

    def _check(self, callback: object, value: float, shown: str) -> None:
        low = self.above
        high = self.below
        inside = (low is None or value > low) and (high is None or value < high)
        inside = inside and (self.least is None or value >= self.least)
        if inside and self._is_possible(value):
            return
        bounds = []
        if self.least is not None:
            bounds.append(f"from {self.least:g}")
        if low is not None:
            bounds.append(f"above {low:g}")
        if high is not None:
            bounds.append(f"below {high:g}")
        accepted = " and ".join(bounds) or "finite"
        raise UserError(
            f"{type(callback).__name__}: {self.name}={shown} is not accepted; it has to be "
            f"{accepted}."
        )
