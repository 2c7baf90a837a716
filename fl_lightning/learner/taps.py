"""The outputs of a learner's modules in a pass, or their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fl_lightning.errors import UserError, suggest
from fl_lightning.learner.layout import last_of

LAST = "last"
ENTERING = ":in"
# (tap, output) -> the output that is used in its place
Change = Callable[["Tap", Any], Any]


@dataclass(frozen=True)
class Tap:
    """A module of the learner whose output or input a method reads.

    Args:
        method: the class that declares it; ``name``: its name there.
        path: path of the module in the learner; empty: the learner itself.
        entering: whether the tap reads the module's first positional input, instead of its output.
    """

    method: str
    name: str
    path: str
    entering: bool = False

    def __str__(self) -> str:
        return f"{self.method}: taps[{self.name!r}] = {self.path + ENTERING * self.entering!r}"

    def module(self, learner: nn.Module) -> nn.Module:
        """Return the module in this learner or in a copy of it.

        Raises:
            UserError: it does not exist.
        """
        try:
            return learner.get_submodule(self.path)
        except AttributeError:
            names = [name for name, _ in learner.named_modules() if name]
            raise UserError(
                f"method: {self} names no module of {type(learner).__name__}."
                f"{suggest(self.path, names)} {these(names)}"
            ) from None


def taps_of(method: str, declared: Mapping[str, str], learner: nn.Module) -> list[Tap]:
    """A method's taps; ``"last"``: the last module with parameters of its own."""
    found = []
    for name, path in dict(declared).items():
        place = path.removesuffix(ENTERING)
        if place == LAST:
            place = last_of(learner)
        found.append(Tap(method, name, place, path.endswith(ENTERING)))
    return found


class Seen(dict[Tap, Any]):
    """The last value of each tap in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self._versions: dict[Tap, list[int]] = {}

    def take(self, tap: Tap, value: Any) -> None:
        self[tap] = value
        self._versions[tap] = versions(value)

    def of(self, taps: Iterable[Tap]) -> dict[str, Any]:
        """Return these taps by name.

        Raises:
            UserError: the pass did not call one of the modules, or changed its value in place.
        """
        for tap in taps:
            if tap not in self:
                raise UserError(
                    f"method: {tap}: this local step does not call the module with a positional "
                    "input, so the tap gets no value. Call it in every step."
                )
            if versions(self[tap]) != self._versions[tap]:
                raise UserError(
                    f"method: {tap}: a later module (such as ReLU(inplace=True)) or a local_output "
                    "changes its output in place, so the value is lost. Tap the later module, or "
                    "do not work in place."
                )
        return {tap.name: self[tap] for tap in taps}


def versions(value: Any) -> list[int]:
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [tensor._version for tensor in tensors if not tensor.is_inference()]


@contextmanager
def tapped(learner: nn.Module, taps: Iterable[Tap], change: Change | None = None) -> Iterator[Seen]:
    """Within this context each tap has its module's last output; ``change`` may replace it.

    A tap has the module's own output, from before any change.
    """
    seen = Seen()
    entering: dict[str, list[Tap]] = {}
    leaving: dict[str, list[Tap]] = {}
    for tap in taps:
        (entering if tap.entering else leaving).setdefault(tap.path, []).append(tap)

    def enter(here: list[Tap], inputs: Any) -> None:
        for tap in here if inputs else ():
            seen.take(tap, inputs[0])

    def leave(here: list[Tap], output: Any) -> Any:
        for tap in here:
            seen.take(tap, output)
        for tap in here:
            if change is not None:
                output = change(tap, output)
        return output

    with ExitStack() as stack:
        for here in entering.values():
            hook = _with(enter, here)
            stack.callback(here[0].module(learner).register_forward_pre_hook(hook).remove)
        for here in leaving.values():
            hook = _with(leave, here)
            stack.callback(here[0].module(learner).register_forward_hook(hook).remove)
        yield seen


def _with(look: Callable[..., Any], here: list[Tap]) -> Callable[..., Any]:
    return lambda module, *given: look(here, given[-1])


def these(names: list[str]) -> str:
    return f"There are {', '.join(names)[:300]}." if names else "There are none."
