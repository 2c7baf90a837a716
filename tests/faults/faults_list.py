"""The faults to plant by hand, as replacements of text."""

from __future__ import annotations

from dataclasses import dataclass

Edit = tuple[str, str, str]  # file, right text (once in it), wrong text


@dataclass(frozen=True)
class Fault:
    """A fault, and where it is planted; the tests of the first file should see it."""

    name: str
    edits: list[Edit]


FAULTS = [
    Fault(
        "SCAFFOLD: c_i is never stored",
        [("callbacks/drift/control_variates.py", "self.c_i[clients] += change", "pass")],
    ),
    Fault(
        "SCAFFOLD: the sign of c_i is flipped",
        [
            (
                "callbacks/drift/control_variates.py",
                "self.c - self.c_i[clients]\n",
                "self.c_i[clients] - self.c\n",
            )
        ],
    ),
    Fault(
        "SCAFFOLD: K is taken from the configuration, not counted",
        [
            (
                "fl_lightning/round/client_group.py",
                'rates.elapsed(self.column("steps", self.round.steps))',
                'rates.elapsed(torch.full_like(self.column("steps", self.round.steps), 5.0))',
            )
        ],
    ),
    Fault(
        "FedDyn: the dual is not anchored at w^t",
        [
            (
                "callbacks/drift/dynamic_regularization.py",
                "moved = clients.x - clients.w",
                "moved = clients.x - clients.start",
            )
        ],
    ),
    Fault(
        "FedProx: the norm is not squared",
        [
            (
                "callbacks/drift/proximal_term.py",
                "gradient.add_(clients.x - towards, alpha=self.mu)",
                "gradient.add_((a := clients.x - clients.w) / (1e-12 + clients.norm(a)), "
                "alpha=self.mu)",
            )
        ],
    ),
    Fault(
        "SAM perturbs with weight decay",
        [
            (
                "callbacks/sharpness/sharpness_aware_minimization.py",
                "        norm = clients.norm(gradient)\n",
                "        gradient = gradient + 0.01 * clients.x\n        norm = "
                "clients.norm(gradient)\n",
            )
        ],
    ),
    Fault(
        "FedALS: φ is never averaged (the paper's misprint)",
        [
            (
                "fl_lightning/round/model_parts.py",
                "return period is not None and (t + 1) % period == 0",
                "return period == 1",
            )
        ],
    ),
    Fault(
        "server state is left out of the checkpoint",
        [
            (
                "fl_lightning/checkpoint.py",
                "server={key: value.clone() for key, value in state.server.items()}",
                "server={}",
            )
        ],
    ),
    Fault(
        "client state is left out of the checkpoint",
        [("fl_lightning/checkpoint.py", "clients=index,", "clients={},")],
    ),
    Fault(
        "buffers of the last client are kept",
        [
            ("fl_lightning/engines/sequential.py", "copy.load_buffers(round.buffers)", "pass"),
            (
                "fl_lightning/round/global_model.py",
                "    for name, buffer in learner.named_buffers():\n        if",
                "    for name, buffer in ():\n        if",
            ),
        ],
    ),
    Fault(
        "a started share of an epoch is rounded down",
        [
            (
                "fl_lightning/round/cohort.py",
                "-int(-((epochs - whole) * steps) // 1)",
                "int(((epochs - whole) * steps) // 1)",
            )
        ],
    ),
    Fault(
        "Cosine is one round late",
        [
            (
                "fl_lightning/schedules.py",
                "math.pi * (round - self.warmup)",
                "math.pi * max(round - self.warmup - 1, 0)",
            )
        ],
    ),
    Fault(
        "buffers move during a full gradient",
        [
            (
                "fl_lightning/client/client_trainer.py",
                "                    copy.load_buffers(buffers)\n                    s",
                "                    s",
            ),
            (
                "fl_lightning/client/client_trainer.py",
                "                copy.load_buffers(buffers)\n                present.",
                "                present.",
            ),
        ],
    ),
    Fault(
        "the second pass of SAM draws new random numbers",
        [
            (
                "fl_lightning/client/local_step.py",
                "            before.restore()\n",
                "            pass\n",
            )
        ],
    ),
    Fault(
        "who was chosen is forgotten after the round",
        [("fl_lightning/storage/run_state.py", "self.chosen[outcome.t] = outcome.chosen", "pass")],
    ),
    Fault(
        "rows at the server are those of one process",
        [
            (
                "fl_lightning/round/server.py",
                "in gathered(rows_here):",
                "in [rows_here]:",
            )
        ],
    ),
    Fault(
        "updates are gathered in another order than the clients'",
        [
            (
                "fl_lightning/aggregation/server_update.py",
                "zip(rows, transaction.finished, s",
                "zip(rows, transaction.finished[::-1], s",
            )
        ],
    ),
    Fault(
        "what on_updates changes is not averaged",
        [
            (
                "fl_lightning/aggregation/server_update.py",
                'methods.run("on_updates", server)\n        '
                "add_up(transaction, transaction.gathered)",
                "add_up(transaction, transaction.gathered)\n        "
                'methods.run("on_updates", server)',
            )
        ],
    ),
    Fault(
        "the gradient at another point draws new random numbers",
        [
            (
                "fl_lightning/client/local_step.py",
                "drawn_again(self.before, self.model.x)",
                "drawn_again(None, self.model.x)",
            )
        ],
    ),
    Fault(
        "the gradient at another point begins from moved buffers",
        [
            (
                "fl_lightning/client/local_step.py",
                "        self.model.load_buffers(self.buffers)\n",
                "",
            )
        ],
    ),
    Fault(
        "the number of the local step stands still",
        [
            (
                "fl_lightning/round/client_group.py",
                "            self.step += 1\n",
                "            pass\n",
            )
        ],
    ),
    Fault(
        "held-out samples are those that are trained on",
        [
            (
                "fl_lightning/evaluation/in_round.py",
                "client, indices(client), step)",
                "client, data.client_indices(client), step)",
            )
        ],
    ),
    Fault(
        "flipped labels are not flipped in full gradients",
        [
            (
                "fl_lightning/client/local_step.py",
                "return ((change(client, batch), number)",
                "return ((batch, number)",
            )
        ],
    ),
    Fault(
        "Krum counts an update's distance to itself",
        [
            (
                "callbacks/robust/robust_aggregation.py",
                "squared_distances(u).fill_diagonal_(torch.inf)\n    return away",
                "squared_distances(u)\n    return away",
            )
        ],
    ),
    Fault(
        "mixing leaves an update itself out",
        [
            (
                "callbacks/robust/robust_aggregation.py",
                "fill_diagonal_(-1)",
                "fill_diagonal_(torch.inf)",
            )
        ],
    ),
    Fault(
        "the trimmed mean trims one side",
        [("callbacks/robust/robust_aggregation.py", "[k : len(u) - k].mean(0)", "[k:].mean(0)")],
    ),
    Fault(
        "the median of an even number is the lower of two",
        [
            (
                "callbacks/robust/robust_aggregation.py",
                "(ordered[(n - 1) // 2] + ordered[n // 2]) / 2",
                "ordered[(n - 1) // 2]",
            )
        ],
    ),
    Fault(
        "alie takes mean and deviation over attackers too",
        [
            (
                "callbacks/robust/byzantine_clients.py",
                "honest = u[~bad].double()",
                "honest = u.double()",
            )
        ],
    ),
    Fault(
        "privacy: the mean is over those that took part",
        [
            (
                "callbacks/robust/differential_privacy.py",
                "return d / expected",
                "return d / max(server.n, 1)",
            )
        ],
    ),
    Fault(
        "privacy: noise is not scaled by the clipping norm",
        [("callbacks/robust/differential_privacy.py", "d += sigma * limit * ", "d += sigma * ")],
    ),
    Fault(
        "privacy: what attackers send is not clipped",
        [
            (
                "callbacks/robust/differential_privacy.py",
                '                self.use("on_updates", self.clip_again)',
                "                pass",
            )
        ],
    ),
    Fault(
        "Poisson rounds always have somebody",
        [
            (
                "fl_lightning/round/cohort.py",
                'heads if self.sampling == "poisson" else max(min(1, m), heads)',
                "max(1, heads)",
            )
        ],
    ),
    Fault(
        "Power-of-Choice takes the smallest losses",
        [
            (
                "callbacks/sending/power_of_choice.py",
                "argsort(descending=True, stable=True)",
                "argsort(stable=True)",
            )
        ],
    ),
    Fault(
        "QSGD: levels are rounded to the nearest",
        [("fl_lightning/round/quantization.py", "(drawn < r - low)", "(r - low > 0.5)")],
    ),
    Fault(
        "QSGD: the scale is rounded down, too",
        [
            (
                "fl_lightning/round/quantization.py",
                "torch.where(near.double() < scales, above, near)",
                "near",
            )
        ],
    ),
    Fault(
        "EF-signSGD: the error is that of the update alone",
        [("callbacks/sending/sign_update.py", "= v - sent", "= update - sent")],
    ),
    Fault(
        "rand-k: one draw for all rounds",
        [("callbacks/sending/random_k.py", '"randk", round, client', '"randk", 0, client')],
    ),
    Fault(
        "PowerSGD: directions are not orthonormal",
        [("callbacks/sending/low_rank_update.py", "orthonormal(m @ start)", "m @ start")],
    ),
    Fault(
        "EF21: the mean over all is one over participants",
        [
            (
                "callbacks/sending/error_feedback_21.py",
                "server.mean_change * server.n / server.num_clients",
                "server.mean_change",
            )
        ],
    ),
    Fault(
        "quantised broadcast: one draw for all rounds",
        [("callbacks/sending/quantized_broadcast.py", '"broadcast", server.round', '"broadcast"')],
    ),
    Fault(
        "asynchronous clients train from the present model",
        [
            (
                "fl_lightning/loop.py",
                "w, buffers = self.state.versions[v] if v < round.t else (round.w, round.buffers)",
                "w, buffers = round.w, round.buffers",
            )
        ],
    ),
    Fault(
        "old updates count like new ones",
        [("fl_lightning/aggregation/server_update.py", "if transaction.scale != 1:", "if False:")],
    ),
    Fault(
        "FedAsync measures from the model that a client was given",
        [
            (
                "fl_lightning/loop.py",
                "transaction.base = transaction.round.w if transaction.planned.mixed else None",
                "transaction.base = None",
            )
        ],
    ),
    Fault(
        "a checkpoint loses the models that clients still train from",
        [
            (
                "fl_lightning/checkpoint.py",
                "            versions=versions,",
                "            versions={},",
            )
        ],
    ),
]
