"""Before round 0, finds out whether several samples' gradients can be taken together."""

from __future__ import annotations

import torch

from fl_lightning.client.sample_gradients import SampleGradients
from fl_lightning.engines.engine_context import LearnerCopies
from fl_lightning.engines.trials.batch_check import first_line
from fl_lightning.learner.attributes import Attributes
from fl_lightning.machine.random_state import RandomState


def why_one_by_one(copies: LearnerCopies) -> str:
    """Return why ``vmap`` cannot take a client's first samples, tried on a copy; empty: it can."""
    context = copies.context
    before = RandomState(context.w)
    try:
        copy = copies.original.another(aliased=False)
        copy.x.copy_(context.w.detach())
        copy.begin(context.work.data)
        copy.present.silent = True
        client = context.cohort.tried(0)[0]
        read = context.work.data.client_batches(client, 0, 1, device=context.w.device)
        batch = next(iter(list(read)))
        attributes = Attributes(copy.learner, metrics=True)
        own = {name: id(buffer) for name, buffer in copy.buffers.items()}
        with torch.no_grad(), copy.present.lending() as lent:
            next(SampleGradients(copy, 2).of(batch, 0), None)
        if lent.reached:
            return f"its training_step writes to {lent.reached}"
        for name, buffer in copy.buffers.items():
            if own.get(name) != id(buffer):
                return f"its training_step assigns to the buffer {name}"
        changed = attributes.changed(Attributes(copy.learner, metrics=True))
        return f"its training_step changes {changed[0]}" if changed else ""
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)[:120]}"
    finally:
        before.restore()
