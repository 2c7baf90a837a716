"""Faults of losses that look at models, to be planted by hand."""

from __future__ import annotations

from tests.faults.faults_list import Fault

MOON, FEDNTD, FEDLC = (
    f"callbacks/losses/{name}.py"
    for name in ("model_contrast", "not_true_distillation", "logit_calibration")
)
TAPS = "fl_lightning/learner/taps.py"
RANDOM = "fl_lightning/machine/random_state.py"
LOOKS, COPY = (f"fl_lightning/client/{name}.py" for name in ("forward_hooks", "flat_learner"))

LOOKING_FAULTS = [
    Fault("MOON: pulled to the negative", [(MOON, "(near - far)", "(far - near)")]),
    Fault(
        "MOON: the negative is w^0, as in PFLlib",
        [(MOON, 'initial="current_model"', 'initial="initial_model"')],
    ),
    Fault(
        "MOON: the features are the logits",
        [(MOON, '{"features": "last:in"}', '{"features": "last"}')],
    ),
    Fault(
        "FedNTD: the student comes first in the divergence",
        [
            (
                FEDNTD,
                "log_softmax(student, 1), log_softmax(known, 1)",
                "log_softmax(known, 1), log_softmax(student, 1)",
            )
        ],
    ),
    Fault(
        "FedNTD: without τ²",
        [(FEDNTD, "self.strength * (self.temperature * self.temperature)", "self.strength")],
    ),
    Fault(
        "FedNTD: the teacher is the client's start",
        [(FEDNTD, "clients.seen_at(clients.w)", "clients.seen_at(clients.start)")],
    ),
    Fault(
        "FedNTD: classes before the own one move up, too",
        [(FEDNTD, "(others >= labels[:, None])", "(others > labels[:, None])")],
    ),
    Fault("FedLC: margins of rare classes are small", [(FEDLC, "** -0.25", "** 0.25")]),
    Fault(
        "FedLC: an absent class counts as one sample",
        [(FEDLC, "absent = torch.inf if self.tau > 0 else 0.0", "absent = self.tau")],
    ),
    Fault("a look is in training mode", [(COPY, "part.training = False", "pass")]),
    Fault(
        "a look stays in evaluation mode",
        [(COPY, "                part.training = True\n", "                pass\n")],
    ),
    Fault(
        "a look's buffers are the step's",
        [
            (
                LOOKS,
                "copy.aside(x, self.buffers, training)",
                "copy.aside(x, dict(copy.buffers), training)",
            )
        ],
    ),
    Fault(
        "a look changes the step's buffers",
        [
            (
                COPY,
                "                module._buffers[leaf] = buffer\n            for (parameter",
                "                pass\n            for (parameter",
            )
        ],
    ),
    Fault(
        "a look draws other numbers",
        [(LOOKS, "drawn_again(before, copy.x)", "drawn_again(None, copy.x)")],
    ),
    Fault(
        "a look's draws stay",
        [(RANDOM, "        present.restore()\n", "        pass\n")],
    ),
    Fault(
        "after a look the learner is at x, not at the perturbed point",
        [
            (
                COPY,
                "            tie(self.parameters, found)\n",
                "            tie(self.parameters, self._views)\n",
            )
        ],
    ),
    Fault(
        "a look is logged",
        [(COPY, "        self.logging = False\n        try:\n", "        try:\n")],
    ),
    Fault("a look is not counted", [(LOOKS, "        group.count_pass(method)\n", "")]),
    Fault(
        "what is seen is the changed output",
        [
            (
                TAPS,
                "                output = change(tap, output)\n",
                "                output = seen[tap] = change(tap, output)\n",
            )
        ],
    ),
    Fault(
        "a recorded step's look has another client's own buffers",
        [(LOOKS, "group.looked_up or bool(group.round.own_buffers)", "group.looked_up")],
    ),
    Fault(
        "only the first method changes the loss",
        [
            (
                LOOKS,
                "call, self.methods.call(call, self.clients, changed, here, batch), loss",
                "call, self.methods.call(call, self.clients, loss, here, batch), loss",
            )
        ],
    ),
    Fault(
        "the changed loss is differentiated only where it is logged",
        [
            (
                COPY,
                "        if self.forward_hooks is None:\n",
                "        if self.forward_hooks is None or not log:\n",
            )
        ],
    ),
    Fault(
        "counts are of the labels before they are flipped",
        [
            (
                "fl_lightning/client/local_step.py",
                'if counts is None or self.methods.owner("local_batch") is None:',
                "if True:",
            )
        ],
    ),
    Fault(
        "a method that looks ends before others have taken their gradients",
        [
            (
                "fl_lightning/callback_list.py",
                "ending = sorted(self.callbacks, key=looks)",
                "ending = sorted(self.callbacks, key=looks, reverse=True)",
            )
        ],
    ),
]
