"""The optimizer of the local steps: any torch optimizer, on the flat vector where it works
elementwise.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fl_lightning.errors import UserError
from fl_lightning.learner import Layout, trainable
from fl_lightning.round.client_schedule import ClientSchedule
from fl_lightning.round.context import ClientRates, several_in
from fl_lightning.settings import OptimizerFactory

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


class ClientOptimizer:
    """Steps ``x`` ``(1, D)`` with a gradient of that shape, whatever optimizer the user chose.

    Plain SGD is one pass over x; optimizers that treat each coordinate alike work on the flat
    vector, all others (and those with several parameter groups) on the parameters' views. State is
    fresh every round unless loaded.
    """

    def __init__(
        self, optimizer: Optimizer, learner: nn.Module, x: Tensor, gradient: Tensor, layout: Layout
    ) -> None:
        self.x = x
        self.gradient = gradient
        self.by_step = False  # whether rates change within a client's round
        self.shown: Optimizer | None = None
        self._of_groups = list(range(len(optimizer.param_groups)))  # which of them are stepped
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
            parameter = nn.Parameter(x.view(-1), requires_grad=False)
            parameter.grad = gradient.view(-1)
            options = {k: v for k, v in group.items() if k not in ("params", "initial_lr")}
            build: Any = type(optimizer)
            taken = {k: v for k, v in options.items() if k in inspect.signature(build).parameters}
            self.optimizer: Optimizer = build([{"params": [parameter], **options}], **taken)
            self._fresh = {p: copy.deepcopy(made) for p, made in self.optimizer.state.items()}
        else:
            names = {id(p): name for name, p in trainable(learner)}
            views = dict(zip(layout, layout.views(x.view(-1)), strict=True))
            gradients = dict(zip(layout, layout.views(gradient.view(-1)), strict=True))
            groups = []
            self._of_groups = []
            self._fresh = {}
            for j, g in enumerate(optimizer.param_groups):
                mine = []
                for p in g["params"]:
                    if id(p) not in names:
                        continue
                    parameter = nn.Parameter(views[names[id(p)]], requires_grad=False)
                    parameter.grad = gradients[names[id(p)]]
                    mine.append(parameter)
                    if p in optimizer.state:
                        self._fresh[parameter] = optimizer.state[p]
                if mine:
                    groups.append({**g, "params": mine})
                    self._of_groups.append(j)
            self.optimizer = copy.copy(optimizer)
            self.optimizer.param_groups = groups
            self.optimizer.state = type(optimizer.state)(dict)
        self.base = [float(g["lr"]) for g in self.optimizer.param_groups]
        self._options = [
            {k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups
        ]

    def show(self, optimizer: Optimizer, learner: nn.Module, copy_of_it: nn.Module) -> Optimizer:
        """The clients' optimizer over the parameters of a copy, for its hooks to look at; rates as
        they are now.
        """
        names = {id(p): name for name, p in learner.named_parameters()}
        own = dict(copy_of_it.named_parameters())
        self.shown = copy.copy(optimizer)
        self.shown.param_groups = [
            {**g, "params": [own[names[id(p)]] for p in g["params"] if id(p) in names]}
            for g in optimizer.param_groups
        ]
        self.shown.state = type(optimizer.state)(dict)
        self._made = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        return self.shown

    def begin(self, rates: ClientRates, state: dict[str, Tensor] | None) -> None:
        """Start a client at the round's learning rates; state fresh, or the client's own."""
        self._rates = rates
        self.by_step = rates.by_step
        if self.plain:
            self.rates = [base * rates.factor for base in self.base]
        else:
            self.optimizer.state.clear()
            for parameter, made in self._fresh.items():  # some are made with state: Adagrad, say
                self.optimizer.state[parameter] = {
                    name: copy.deepcopy(value) for name, value in made.items()
                }
            for group, options, base in zip(
                self.optimizer.param_groups, self._options, self.base, strict=True
            ):
                group.update(copy.deepcopy(options))
                group["lr"] = base * rates.factor
            if state:
                self._load(state)
        if self.shown is not None:
            for group, options in zip(self.shown.param_groups, self._made, strict=True):
                group["lr"] = float(options["lr"]) * rates.factor
        self.at(0)

    def at(self, step: int) -> None:
        """To the scheduler's rates at a local step, where there is one."""
        if (groups := self._rates.groups(step)) is None:
            return
        factor = self._rates.factor
        settings = [{**group, "lr": group["lr"] * factor} for group in groups]
        if self.plain:
            self.rates = [settings[0]["lr"]]
        else:
            for group, j in zip(self.optimizer.param_groups, self._of_groups, strict=True):
                group.update(settings[j])
        if self.shown is not None:
            for group, setting in zip(self.shown.param_groups, settings, strict=True):
                group.update(setting)

    def step(self, gradient: Tensor) -> None:
        if self.plain:
            self._fused([self.x], [gradient.to(self.x.dtype).contiguous()])
            return
        if gradient is not self.gradient:
            self.gradient.copy_(gradient)
        self.optimizer.step()

    def step_each(self, gradients: tuple[Tensor, ...]) -> None:
        """Plain SGD's step from one gradient a parameter; the same bits as :meth:`step`, without
        the copy into g.
        """
        dense = [g.to_dense() if g.is_sparse else g.contiguous() for g in gradients]
        self._fused(self._views_of_x, dense)

    def _fused(self, x: list[Tensor], gradients: list[Tensor]) -> None:
        """x ← x - η (g + λ x) in one pass: torch.optim.SGD's own kernel; x and g lie in memory in
        the same order.
        """
        half = x[0].device.type == "cpu" and x[0].dtype in (torch.bfloat16, torch.float16)
        # before torch 2.14 that kernel skips most of such a tensor
        now = [each.float() for each in x] if half else x
        torch._fused_sgd_(
            now, [each.float() for each in gradients] if half else gradients, [], weight_decay=self.weight_decay,
            lr=self.rates[0], momentum=0.0, dampening=0.0, nesterov=False, maximize=False, is_first_step=True,
        )  # fmt: skip
        if half:
            for each, value in zip(x, now, strict=True):
                each.copy_(value)

    def state(self) -> dict[str, Tensor]:
        """The client's optimizer state as rows: ``"optimizer.<parameter>.<name>"``."""
        if self.plain:
            return {}
        rows: dict[str, Tensor] = {}
        for j, parameter in enumerate(self._parameters()):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    rows[f"optimizer.{j}.{name}"] = value.detach().clone()
                elif isinstance(value, (int, float)):
                    rows[f"optimizer.{j}.{name}:{type(value).__name__}"] = torch.tensor(
                        value, dtype=torch.float64
                    )
                elif value is not None:
                    raise UserError(
                        f"keep_optimizer_state=True cannot keep {type(self.optimizer).__name__}'s "
                        f"state {name!r}, a {type(value).__name__}; tensors and numbers can be "
                        "kept. Set it to False, or use another."
                    )
        return rows

    def tensors(self) -> dict[str, Tensor]:
        """The tensors that a step changes besides x, by name."""
        if self.plain:
            return {}
        return {
            f"optimizer.{j}.{name}": value
            for j, parameter in enumerate(self._parameters())
            for name, value in self.optimizer.state.get(parameter, {}).items()
            if isinstance(value, Tensor)
        }

    def _load(self, state: dict[str, Tensor]) -> None:
        kinds: dict[str, Callable[[float], Any]] = {"int": int, "float": float, "bool": bool}
        parameters = self._parameters()
        for key, value in state.items():
            _, j, name = key.split(".", 2)
            name, _, kind = name.partition(":")
            target = self.optimizer.state[parameters[int(j)]]
            target[name] = kinds[kind](value.item()) if kind else value.clone()

    def _parameters(self) -> list[nn.Parameter]:
        return [p for g in self.optimizer.param_groups for p in g["params"]]


def is_flat(optimizer: Optimizer, learner: nn.Module) -> bool:
    """Whether it can work on the flat vector: elementwise, with one group that has all parameters."""
    own = (
        type(optimizer).__module__.startswith("torch.optim")
        and type(optimizer).__name__ in ELEMENTWISE
    )
    if not own or len(optimizer.param_groups) != 1:
        return False
    return {id(p) for p in optimizer.param_groups[0]["params"]} >= {
        id(p) for _, p in trainable(learner)
    }


def is_plain_sgd(optimizer: Optimizer) -> bool:
    group = optimizer.param_groups[0]
    return (
        type(optimizer) is torch.optim.SGD
        and len(optimizer.param_groups) == 1
        and not (group["momentum"] or group["nesterov"] or group["maximize"])
        and isinstance(group["lr"], float | int)
    )


def weight_decays(optimizer: Optimizer) -> list[float]:
    """λ of each parameter group where it is part of the gradient; 0 where the optimizer decouples
    it (AdamW).
    """
    return [
        0.0
        if isinstance(optimizer, torch.optim.AdamW) or g.get("decoupled_weight_decay")
        else float(g.get("weight_decay", 0))
        for g in optimizer.param_groups
    ]


def rates(
    optimizer: Optimizer, schedule: ClientSchedule | None, device: torch.device
) -> ClientRates:
    """The settings of the first group, before any decay, and in which of them the groups differ."""
    first = optimizer.param_groups[0]
    return ClientRates(
        factor=1.0,
        lr=torch.tensor(float(first["lr"]), dtype=torch.float64, device=device),
        momentum=float(first.get("momentum", 0.0)),
        weight_decay=weight_decays(optimizer)[0],
        plain_sgd=is_plain_sgd(optimizer),
        optimizer=type(optimizer).__name__,
        several=several_in(optimizer.param_groups),
        schedule=schedule,
    )


def of_server(factory: OptimizerFactory | None, w: Tensor) -> Optimizer:
    """The server optimizer over w; without a factory SGD with learning rate 1."""
    parameters: list[Any] = [w]
    return torch.optim.SGD(parameters, lr=1.0) if factory is None else factory(parameters)
