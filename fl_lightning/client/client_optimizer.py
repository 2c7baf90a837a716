"""The optimizer of the local steps: any of torch's, on the flat vector where it is elementwise."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.client.optimizer_copy import (
    Shown,
    alike,
    as_row,
    copied_values,
    own_attributes,
    shallow,
)
from fl_lightning.errors import UserError
from fl_lightning.learner.layout import Layout, trainable
from fl_lightning.round.client_schedule import MOVED, ClientSchedule
from fl_lightning.round.context import ClientRates, several_in
from fl_lightning.round.settings import OptimizerFactory

ELEMENTWISE = [
    "SGD",
    "Adam",
    "AdamW",
    "Adagrad",
    "RMSprop",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "Rprop",
    "ASGD",
]
# Optimizers whose steps do not depend on their step count.
COUNT_UNREAD = ["RMSprop", "Adadelta", "Rprop"]


class ClientOptimizer:
    """Steps ``x`` ``(1, D)`` with a gradient of that shape, whatever optimizer the user chose.

    Plain SGD is one pass over x; optimizers that treat each coordinate alike work on the flat
    vector, all others (and those with several parameter groups) on the parameters' views. State is
    fresh every round unless loaded.

    Args:
        fused: whether Adam and AdamW take torch's fused kernel, where :func:`can_be_fused`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        learner: nn.Module,
        x: Tensor,
        gradient: Tensor,
        layout: Layout,
        fused: bool = False,
    ) -> None:
        self.x = x
        self.gradient = gradient
        self.by_step = False  # whether learning rates change within a client's round
        # place of a parameter → the parameter; empty if the optimizer steps the flat vector
        self.by_parameter: dict[int, nn.Parameter] = {}
        self._places = [where for where, _ in layout.values()]
        self.shown: Optimizer | None = None
        self._untrained: Tensor | None = None
        self._wholly_untrained: list[nn.Parameter] = []
        self._of_groups = list(range(len(optimizer.param_groups)))  # the groups that are stepped
        group = optimizer.param_groups[0]
        flat = is_flat(optimizer, learner)
        self.plain = flat and is_plain_sgd(optimizer) and x.is_floating_point()
        if self.plain:
            self.weight_decay = float(group["weight_decay"])
            self.base = [float(group["lr"])]
            self.rates = list(self.base)
            self._views_of_x = layout.views(x.view(-1))
            return
        if flat:
            self._build_flat(optimizer, gradient, fused)
        else:
            self._build_by_parameter(optimizer, learner, gradient, layout)
        self.base = [float(g["lr"]) for g in self.optimizer.param_groups]
        # Options and attributes as they were built: a step may change them and add to them.
        self._options = [copied_values(o, self._replaced) for o in options_of(self.optimizer)]
        self._attributes = copied_values(own_attributes(self.optimizer), self._replaced)

    def _build_flat(self, optimizer: Optimizer, gradient: Tensor, fused: bool) -> None:
        """The user's optimizer once more, over the flat vector."""
        parameter = nn.Parameter(self.x.view(-1), requires_grad=False)
        parameter.grad = gradient.view(-1)
        # The first rate that a scheduler notes is not an option of the optimizer.
        options = {k: v for k, v in options_of(optimizer)[0].items() if k != "initial_lr"}
        if fused:
            options["fused"] = True
        options |= recordable(optimizer, options, self.x)
        build: Any = type(optimizer)
        arguments = {k: v for k, v in options.items() if k in inspect.signature(build).parameters}
        self.optimizer: Optimizer = build([{"params": [parameter], **options}], **arguments)
        self._fresh = {p: copy.deepcopy(state) for p, state in self.optimizer.state.items()}
        self._replaced: dict[int, Any] = {}

    def _build_by_parameter(
        self, optimizer: Optimizer, learner: nn.Module, gradient: Tensor, layout: Layout
    ) -> None:
        """A copy of the user's optimizer over the parameters' views into the flat vector."""
        names = {id(p): name for name, p in trainable(learner)}
        views = dict(zip(layout, layout.views(self.x.view(-1)), strict=True))
        gradients = dict(zip(layout, layout.views(gradient.view(-1)), strict=True))
        groups = []
        replaced: dict[int, Any] = {}
        self._of_groups = []
        self._fresh = {}
        places = {name: j for j, name in enumerate(layout)}
        for j, g in enumerate(optimizer.param_groups):
            parameters = []
            for p in g["params"]:
                if id(p) not in names:
                    continue
                parameter = nn.Parameter(views[names[id(p)]], requires_grad=False)
                parameter.grad = gradients[names[id(p)]]
                parameters.append(parameter)
                replaced[id(p)] = parameter
                self.by_parameter[places[names[id(p)]]] = parameter
                if p in optimizer.state:
                    self._fresh[parameter] = optimizer.state[p]
            if parameters:
                recorded = recordable(optimizer, g, self.x)
                groups.append({**g, **recorded, "params": parameters})
                self._of_groups.append(j)
        self.optimizer = shallow(optimizer)
        self.optimizer.state = type(optimizer.state)(dict)
        # An attribute that lists parameters, for example, lists this client's parameters here.
        replaced[id(optimizer)] = self.optimizer
        vars(self.optimizer).update(copied_values(own_attributes(optimizer), replaced))
        self.optimizer.param_groups = groups
        self._replaced = {id(kept): kept for kept in replaced.values()}

    def show(self, optimizer: Optimizer, learner: nn.Module, copy_of_it: nn.Module) -> Optimizer:
        """The clients' optimizer over the parameters of a copy, for its hooks to look at."""
        names = {id(p): name for name, p in learner.named_parameters()}
        parameters = dict(copy_of_it.named_parameters())
        self.shown = shallow(optimizer)
        self.shown.param_groups = []
        for g in optimizer.param_groups:
            own = [parameters[names[id(p)]] for p in g["params"] if id(p) in names]
            self.shown.param_groups.append(Shown({**g, "params": own}))
        self.shown.state = type(optimizer.state)(dict)
        self._made = options_of(optimizer)
        return self.shown

    def begin(self, rates: ClientRates, state: dict[str, Tensor] | None) -> None:
        """Start a client at the round's learning rates; state fresh, or the client's own."""
        self._rates = rates
        self.by_step = rates.by_step
        if self.plain:
            self.rates = [base * rates.factor for base in self.base]
        else:
            # Some optimizers, such as Adagrad, are built with a state, and each client starts with
            # it.
            self.optimizer.state.clear()
            for parameter, state_made in self._fresh.items():
                self.optimizer.state[parameter] = {
                    name: copy.deepcopy(value) for name, value in state_made.items()
                }
            self._put_back(rates.factor)
            if state:
                self._load(state)
        if self.shown is not None:
            for group, options in zip(self.shown.param_groups, self._made, strict=True):
                group.update(lr=float(options["lr"]) * rates.factor)
        self.at(0)

    def _put_back(self, factor: float) -> None:
        """Give the optimizer the groups and attributes that it was built with, at these rates."""
        groups = self.optimizer.param_groups
        for group, options, base in zip(groups, self._options, self.base, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(copied_values(options, self._replaced), params=parameters)
            group["lr"] = base * factor
        own = vars(self.optimizer)
        for name in own_attributes(self.optimizer).keys() - self._attributes.keys():
            del own[name]
        own.update(copied_values(self._attributes, self._replaced))
        self._rates_set = [group["lr"] for group in groups]

    def at(self, step: int) -> None:
        """Set the scheduler's rates at a local step, where there is a scheduler."""
        if (groups := self._rates.groups(step)) is None:
            return
        factor = self._rates.factor
        settings = [{**group, "lr": group["lr"] * factor} for group in groups]
        if self.plain:
            self.rates = [settings[0]["lr"]]
            self.weight_decay = float(settings[0]["weight_decay"])
        else:
            for group, j in zip(self.optimizer.param_groups, self._of_groups, strict=True):
                group.update(settings[j])
            self._rates_set = [group["lr"] for group in self.optimizer.param_groups]
        if self.shown is not None:
            for group, setting in zip(self.shown.param_groups, settings, strict=True):
                group.update(setting)

    def set_untrained(self, untrained: Tensor | None) -> None:
        """Leave the state of these coordinates ``(n, D)`` as it is in steps; None: of none.

        What steps do to x there, the caller undoes.
        """
        self._untrained = untrained
        self._wholly_untrained = []
        if untrained is not None:
            for j, parameter in self.by_parameter.items():
                if bool(untrained[:, self._places[j]].all()):
                    self._wholly_untrained.append(parameter)

    @contextmanager
    def _untrained_state_kept(self, untrained: Tensor) -> Iterator[None]:
        """Within this context, a step does not change the state of these coordinates ``(n, D)``."""
        state = self._state_by_coordinate(untrained)
        before = {name: value.clone() for name, (value, _) in state.items()}
        with without_gradients(self._wholly_untrained):
            yield
        for name, (value, rests) in self._state_by_coordinate(untrained).items():
            # State that this step created starts at zero.
            earlier = before.get(name, torch.zeros_like(value))
            value.copy_(torch.where(rests, earlier, value))

    def _state_by_coordinate(self, untrained: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """State that has a number for each coordinate, by name, with what of it rests."""
        places = {id(parameter): self._places[j] for j, parameter in self.by_parameter.items()}
        found = {}
        for key, value, parameter in self._entries():
            if isinstance(value, Tensor) and value.shape == parameter.shape:
                rests = untrained[:, places[id(parameter)]] if places else untrained
                found[key] = value, rests.reshape(value.shape)
        return found

    def step(self, gradient: Tensor, missing: Sequence[int] = ()) -> None:
        """Step with a gradient of x's shape.

        ``missing``: parameters without a gradient, by place. As with torch's optimizers they stay,
        weight decay and momentum included; a step count that all parameters share goes on.
        """
        with self._left_out(missing) if missing else nullcontext():
            if self.plain:
                self._fused([self.x], [gradient.to(self.x.dtype).contiguous()])
                return
            if gradient is not self.gradient:
                self.gradient.copy_(gradient)
            untrained = self._untrained
            with nullcontext() if untrained is None else self._untrained_state_kept(untrained):
                self.optimizer.step()

    def step_each(self, gradients: tuple[Tensor, ...], missing: Sequence[int] = ()) -> None:
        """Take plain SGD's step from one gradient per parameter, with the bits of :meth:`step`.

        It spares the copy of the gradients into one vector.
        """
        dense = [g.to_dense() if g.is_sparse else g.contiguous() for g in gradients]
        with self._left_out(missing) if missing else nullcontext():
            self._fused(self._views_of_x, dense)

    @contextmanager
    def _left_out(self, missing: Sequence[int]) -> Iterator[None]:
        """Within, a step leaves these parameters and their state as they are."""
        # Plain SGD without weight decay does not move a coordinate whose gradient is zero.
        if self.plain and not self.weight_decay:
            yield
        elif self.by_parameter:
            left_out = [self.by_parameter[j] for j in missing if j in self.by_parameter]
            with without_gradients(left_out):
                yield
        else:
            untrained = torch.zeros_like(self.x, dtype=torch.bool)
            for j in missing:
                untrained[:, self._places[j]] = True
            before = self.x.clone()
            with self._untrained_state_kept(untrained):
                yield
            self.x.copy_(torch.where(untrained, before, self.x))

    def _fused(self, x: list[Tensor], gradients: list[Tensor]) -> None:
        """x ← x - η (g + λ x) in one pass, by torch.optim.SGD's own kernel.

        x and g lie in memory in the same order.
        """
        torch._fused_sgd_(
            x,
            gradients,
            [],
            weight_decay=self.weight_decay,
            lr=self.rates[0],
            momentum=0.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=True,
        )

    def state(self) -> dict[str, Tensor]:
        """The client's optimizer state as rows: ``"optimizer.<parameter>.<name>"``.

        Raises:
            UserError: a state that is neither a tensor nor a number, or steps change a parameter
                group or an attribute, too.
        """
        if self.plain:
            return {}
        if changed := self._changed_beside():
            raise UserError(
                f"keep_optimizer_state=True keeps the state that {type(self.optimizer).__name__} "
                f"has of each parameter, but its steps change {changed!r} in a parameter group or "
                "in the optimizer itself. Set it to False, or use another optimizer."
            )
        rows = [
            as_row(self.optimizer, f"optimizer.{k}", v)
            for k, v, _ in self._entries()
            if v is not None
        ]
        return dict(rows)

    def _changed_beside(self) -> str:
        """The first option or attribute that steps changed; empty: they changed none."""
        # A schedule sets the options that schedulers change.
        scheduled = () if self._rates.schedule is None else MOVED
        groups = zip(options_of(self.optimizer), self._options, self._rates_set, strict=True)
        pairs = [(now, {**made, "lr": rate}, scheduled) for now, made, rate in groups]
        pairs.append((own_attributes(self.optimizer), self._attributes, ()))
        for now, made, of_run in pairs:
            for name in {**made, **now}:
                if name not in of_run and not alike(now.get(name), made.get(name)):
                    return name
        return ""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a step changes besides x, by name."""
        entries = self._entries()
        return {f"optimizer.{key}": v for key, v, _ in entries if isinstance(v, Tensor)}

    def _entries(self) -> Iterator[tuple[str, Any, nn.Parameter]]:
        """The state of each parameter: a key, the value, and the parameter."""
        if self.plain:
            return
        for j, parameter in enumerate(self._parameters()):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                yield f"{j}.{name}", value, parameter

    def _load(self, state: dict[str, Tensor]) -> None:
        kinds: dict[str, Callable[[float], Any]] = {"int": int, "float": float}
        parameters: list[tuple[nn.Parameter, dict[str, Any]]] = []
        for group in self.optimizer.param_groups:
            parameters += ((parameter, group) for parameter in group["params"])
        for key, value in state.items():
            _, place, name = key.split(".", 2)
            name, _, kind = name.partition(":")
            parameter, options = parameters[int(place)]
            target = self.optimizer.state[parameter]
            if kind:
                target[name] = kinds[kind](value.item())
            else:
                target[name] = value.to(self._home(target, name, options), copy=True)

    def _home(self, target: Mapping[str, Any], name: str, options: dict[str, Any]) -> torch.device:
        """The device on which the optimizer has a tensor of its state; rows lie on the CPU."""
        present = target.get(name)
        if isinstance(present, Tensor):
            return present.device
        # As torch loads a state: a step count stays on the CPU, unless a kernel reads it.
        read = name != "step" or options.get("fused") or options.get("capturable")
        return self.x.device if read else torch.device("cpu")

    def _parameters(self) -> list[nn.Parameter]:
        parameters: list[nn.Parameter] = []
        for group in self.optimizer.param_groups:
            parameters += group["params"]
        return parameters


@contextmanager
def without_gradients(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Within this context, an optimizer leaves these parameters out."""
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    yield
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group, without its parameters."""
    options = [dict(group) for group in optimizer.param_groups]
    for group in options:
        del group["params"]
    return options


def is_flat(optimizer: Optimizer, learner: nn.Module) -> bool:
    """Tell whether it can work on the flat vector: elementwise, one group with all parameters."""
    kind = type(optimizer)
    elementwise = kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE
    if not elementwise or len(optimizer.param_groups) != 1:
        return False
    stepped = {id(p) for p in optimizer.param_groups[0]["params"]}
    return stepped >= {id(p) for _, p in trainable(learner)}


def unheld(optimizer: Optimizer, learner: nn.Module) -> frozenset[int]:
    """Which of the learner's trainable parameters it does not hold, by their place among them."""
    held: set[int] = set()
    for group in optimizer.param_groups:
        held.update(map(id, group["params"]))
    return frozenset(j for j, (_, p) in enumerate(trainable(learner)) if id(p) not in held)


def moves_without_gradient(optimizer: Optimizer) -> bool:
    """Tell whether a gradient of zeros may move a parameter, which it would not do without one."""
    return not is_plain_sgd(optimizer) or bool(optimizer.param_groups[0]["weight_decay"])


def can_be_fused(optimizer: Optimizer, learner: nn.Module) -> bool:
    """Tell whether torch's fused kernel can take the steps of Adam or AdamW on the flat vector.

    It is one pass over x where the default is a dozen, and does not read its step count in Python,
    so that steps can be recorded. What the user chose of the kinds of kernels stays.
    """
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return False
    group = optimizer.param_groups[0]
    free = group["fused"] is None and group["foreach"] is None
    asks = (
        group["capturable"] or group["differentiable"] or not isinstance(group["lr"], float | int)
    )
    return free and not asks and is_flat(optimizer, learner)


def recordable(optimizer: Optimizer, options: dict[str, Any], x: Tensor) -> dict[str, bool]:
    """The option with which a CUDA graph can hold the steps, if the steps have the same bits."""
    name = type(optimizer).__name__
    of_torch = type(optimizer).__module__.startswith("torch.optim")
    same = bool(options.get("fused")) or name in COUNT_UNREAD
    fits = of_torch and x.is_cuda and "capturable" in options
    return {"capturable": True} if fits and same else {}


def is_plain_sgd(optimizer: Optimizer) -> bool:
    group = optimizer.param_groups[0]
    return (
        type(optimizer) is torch.optim.SGD
        and len(optimizer.param_groups) == 1
        and not (group["momentum"] or group["nesterov"] or group["maximize"])
        and isinstance(group["lr"], float | int)
    )


def coupled(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Tell whether a group's weight decay is part of the gradient."""
    decoupled = isinstance(optimizer, torch.optim.AdamW) or group.get("decoupled_weight_decay")
    return not decoupled


def rates(
    optimizer: Optimizer, schedule: ClientSchedule | None, device: torch.device, kept: bool
) -> ClientRates:
    """The settings of the first group, before any decay, and in which of them the groups differ.

    ``kept``: whether clients keep the optimizer's state from round to round.
    """
    first = optimizer.param_groups[0]
    others = [f"{name}={first[name]}" for name in ("nesterov", "dampening") if first.get(name)]
    if not isinstance(optimizer, torch.optim.SGD):
        others.append(f"the rule of {type(optimizer).__name__}")
    if kept:
        others.append("keep_optimizer_state=True")
    # AdamW decouples its weight decay from the gradient.
    decays = coupled(optimizer, first)
    return ClientRates(
        factor=1.0,
        lr=torch.tensor(float(first["lr"]), dtype=torch.float64, device=device),
        momentum=float(first.get("momentum", 0.0)),
        weight_decay=float(first.get("weight_decay", 0)) if decays else 0.0,
        coupled=decays,
        other_momentum=" and ".join(others),
        plain_sgd=is_plain_sgd(optimizer),
        optimizer=type(optimizer).__name__,
        several=several_in(optimizer.param_groups),
        schedule=schedule,
    )


def of_server(factory: OptimizerFactory | None, w: Tensor) -> Optimizer:
    """The server optimizer over w; without a factory SGD with learning rate 1."""
    parameters: list[Any] = [w]
    return torch.optim.SGD(parameters, lr=1.0) if factory is None else factory(parameters)
