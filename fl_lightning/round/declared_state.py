"""A method declares in its class body the state that it keeps and sends.

The framework saves, moves, counts and restores this state.
Shapes: ``D`` trainable parameters as one vector, ``n`` clients trained together.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, overload

import torch
from torch import Tensor

from fl_lightning.errors import UserError
from fl_lightning.introspection.accepted import Above, AtLeast, AtMost, Below, Bound, check
from fl_lightning.schedules import LARGEST, Schedule

if TYPE_CHECKING:
    from typing_extensions import Self

# Shape of one row. A name stands for an attribute of the callback, "D" for the number of
# parameters.
Shape = tuple[int | str, ...]
Initial = Literal["zeros", "initial_model", "current_model"] | Callable[[Tensor], Tensor | float]


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
        size = (self.dtype or w.dtype).itemsize
        return size * math.prod(self.sized(w.numel()))

    def zeros(self, w: Tensor) -> Tensor:
        size = self.sized(w.numel())
        return torch.zeros(size, dtype=self.dtype or w.dtype, device=w.device)

    def first(self, round: Any) -> Tensor:
        """Value before it was ever written; with several rows it is the value of each."""
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

    def settled(
        self, value: Tensor, old: Tensor | None, round: Any, averaged: Tensor | None
    ) -> Tensor:
        """Return the value that is committed; ``old``: the one before, if it was ever written.

        Synchronised state keeps its old value on parts not averaged; with k rows of D numbers
        this holds for each row. ``averaged``: ``(D,)`` bool; None: all is averaged.
        """
        if averaged is None or not self.synchronised or value.shape[-1:] != averaged.shape:
            return value
        if old is None:
            old = self.first(round).to(value.device)
        return torch.where(averaged, value, old)

    def summed_as(self, default: torch.dtype) -> torch.dtype:
        """Return the dtype of its sums, at least float32 for floats; ``default``: the learner's."""
        dtype = self.dtype or default
        return torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def of(self, callback: Any) -> Self:
        """Declaration with the callback's numbers instead of their names in ``shape``."""
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
        check("initial", initial, Initial)
        self.initial = initial
        self.synchronised = synchronised


class PerClient(Declaration):
    """State that is read as rows, ``self.name[clients]``."""

    @overload
    def __get__(self, callback: None, owner: type) -> Self: ...
    @overload
    def __get__(self, callback: Any, owner: type) -> StateRows: ...
    def __get__(self, callback: Any, owner: type) -> Any:
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
    """Rows ``self.name[clients]`` of one round, at first zeros; they are not saved or sent."""


class Exchanged(PerClient):
    """A value that clients exchange with their neighbours, in runs without a server.

    Clients assign ``self.name[clients]`` in ``on_local_end``. In ``on_exchange`` it is what a
    client got: Σ_j V_ij value_j, over its neighbours j and itself, with the weights of
    :class:`Neighbourhood`. It counts as sent once per message, and is not kept.
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
    def __get__(self, callback: Any, owner: type) -> Tensor: ...
    def __get__(self, callback: Any, owner: type) -> Any:
        if callback is None:
            return self
        key = self.key(callback)
        declared = callback.declarations().values() if callback.role == "measurement" else ()
        # A logger may keep values that it sums over clients, without noise.
        if any(each.summed for each in declared):
            callback._transaction.refuse_outsiders(key)
        return callback._transaction.server_state(key, self.of(callback))

    def __set__(self, callback: Any, value: Tensor) -> None:
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
    def __get__(self, callback: Any, owner: type) -> UploadSums: ...
    def __get__(self, callback: Any, owner: type) -> Any:
        return self if callback is None else UploadSums(callback, self.of(callback))


class StateRows:
    """``self.name`` of a :class:`ClientState` or :class:`Scratch`, with rows by ``[clients]``."""

    def __init__(self, callback: Any, declaration: PerClient) -> None:
        self._key = declaration.key(callback)
        self._declaration = declaration

    def __getitem__(self, clients: Any) -> Tensor:
        rows: Tensor = clients._group.read(self._key, self._declaration)
        return rows

    def __setitem__(self, clients: Any, value: Tensor) -> None:
        clients._group.write(self._key, self._declaration, value)

    def staged(self, server: Any) -> Iterator[tuple[Tensor, Tensor]]:
        """``(ids, rows)`` of this round, ascending, in every process; for ``on_round_end``.

        The hook may change the rows in place, each before it takes the next, by what is the same in
        every process: the run commits the change.
        """
        staged: Iterator[tuple[Tensor, Tensor]] = server.staged(self._key, self._declaration)
        return staged

    def rows(self, server: Any, ids: Tensor | Sequence[int]) -> Tensor:
        """Return committed rows ``(k, …)`` of these clients, in hooks that take ``server``.

        The rows are the same in every process. A client without a row has the initial value. Rows
        that this round writes are not included; see :meth:`staged`.
        """
        if not self._declaration.keeps_rows:
            raise TypeError(
                f"{self._declaration.name} exists for one round only, and has no committed rows. "
                "Use a ClientState"
            )
        committed: Tensor = server.committed(self._key, self._declaration, ids)
        return committed


class UploadSums:
    """``self.name`` of an :class:`Upload`: clients assign it, the server reads mean or sum."""

    def __init__(self, callback: Any, declaration: Upload) -> None:
        self._callback = callback
        self._key = declaration.key(callback)
        self._declaration = declaration

    def __setitem__(self, clients: Any, value: Tensor) -> None:
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
        transaction = self._callback._transaction
        weighted: Tensor = transaction.uploaded_weighted(self._key, self._declaration)
        return weighted

    def _total(self) -> tuple[Tensor, int]:
        transaction = self._callback._transaction
        total: tuple[Tensor, int] = transaction.uploaded(self._key, self._declaration)
        return total


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
        lower: Bound = AtLeast(-LARGEST if least is None else least)
        if above is not None:
            lower = Above(above)
        upper: Bound = AtMost(math.inf if infinite else LARGEST)
        if below is not None:
            upper = Below(below)
        self.accepted: Any = Annotated[float, lower, upper] | Schedule

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
        kind = type(callback).__name__
        check(f"{kind}: in round {callback._transaction.t}, {self.name}", number, self.accepted)
        return number

    def __set__(self, callback: Any, value: float | Schedule) -> None:
        check(f"{type(callback).__name__}: {self.name}", value, self.accepted)
        callback.__dict__[self.name] = value
