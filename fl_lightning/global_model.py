"""The learner's weights as the server's vector w, by name for everybody else; what is evaluated; and exporting it."""

from __future__ import annotations

import copy
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from fl_lightning import persistence
from fl_lightning.checkpoint import AtomicCheckpointIO
from fl_lightning.engines.replica import lightning_modules
from fl_lightning.flat import Layout, check_learner_parameters, flatten, tie, trainable
from fl_lightning.forwarding import ForwardedHooks


class GlobalModel(ForwardedHooks):
    """Base of FederatedModule: the learner's parameters are views into one vector, which is evaluated and saved."""

    learner_config: dict[str, Any]
    _layout: Layout | None = None
    _w: Tensor | None = None
    _evaluated: Tensor | None = None

    @property
    def layout(self) -> Layout:
        """``{parameter name: (slice, shape)}`` of the global vector."""
        self.build()
        assert self._layout is not None
        return self._layout

    @property
    def global_vector(self) -> Tensor:
        """The server's model w ``(D,)``."""
        self.build()
        assert self._w is not None
        return self._w

    @property
    def evaluated_vector(self) -> Tensor:
        """What is evaluated and exported ``(D,)``: w itself, but under partial averaging."""
        return self.global_vector if self._evaluated is None else self._evaluated

    def build(self, again: bool = False) -> None:
        """Lay the learner's parameters out in one vector and tie them to it; ``again``: after it may have moved."""
        if self._w is not None and not again:
            return
        parameters = [p for _, p in trainable(self.learner)]
        if self._layout is None or [s for _, s in self._layout.values()] != [p.shape for p in parameters]:
            check_learner_parameters(self.learner)
            self._layout, self._w, self._evaluated = Layout(self.learner), None, None
        first = parameters[0]
        views = [] if self._w is None else self._layout.views(self.evaluated_vector.detach())
        tied = bool(views) and all(p.data_ptr() == v.data_ptr() for p, v in zip(parameters, views, strict=True))
        if not tied or self._w is None or self._w.device != first.device or self._w.dtype != first.dtype:
            flat = flatten([p.detach() for p in parameters])
            if self._w is None:
                self._w = flat.clone().requires_grad_(True)
            else:
                self._w.data = flat
            self._evaluated = None
        tie(parameters, self._layout.views(self.evaluated_vector.detach()))

    def set_evaluated(self, vector: Tensor | None) -> None:
        """Evaluate and export ``vector`` (None: w)."""
        if vector is None and self._evaluated is None:
            return
        self._evaluated = vector
        tie([p for _, p in trainable(self.learner)], self.layout.views(self.evaluated_vector.detach()))

    def export(self, path: str | Path | None = None) -> Any:
        """A copy of the learner with the evaluated weights and buffers; to ``path`` too, as a checkpoint."""
        attached = [(part, part._trainer) for part in lightning_modules(self.learner)]
        try:
            for part, _ in attached:
                part._trainer = None
            learner = copy.deepcopy(self.learner)
        finally:
            for part, trainer in attached:
                part._trainer = trainer
        for part in lightning_modules(learner):
            for name in ("log", "log_dict"):
                part.__dict__.pop(name, None)
        tie(
            [p for _, p in trainable(learner)],
            [v.clone() for v in self.layout.views(self.evaluated_vector.detach())],
        )
        if path is not None:
            parameters = self.learner_config or {k: v for k, v in learner.hparams.items() if persistence.plain(v)}
            weights = {"state_dict": learner.state_dict(), "hyper_parameters": parameters}
            AtomicCheckpointIO().save_checkpoint(
                {**weights, "pytorch-lightning_version": version("pytorch-lightning")}, path
            )
        return learner

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The learner's own, under its own names."""
        return self.learner.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        strict = strict and self.learner.strict_loading
        return self.learner.load_state_dict(state_dict, strict=strict)
