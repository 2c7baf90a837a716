"""
Kill and resume
===============

A run is a command and a folder. Killed without warning, it goes on where it stopped when the
folder is named again, and ends with the same bits as a run that nothing happened to.
"""

# %%
# SCAFFOLD keeps a vector for each client, which has to survive as well.
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from torch.nn.utils import parameters_to_vector

import fl_lightning

folder = Path("runs/examples/kill_and_resume")
fit = [sys.executable, "-m", "fl_lightning", "fit"]
settings = ["-c", "base", "-c", "data/digits", "-c", "method/scaffold", "-c", "trainer/cpu"]
settings += ["--trainer.max_epochs", "20", "--model.engine", "sequential"]


def rounds_of(run):
    """How many rounds ``run`` has written down."""
    metrics = run / "metrics.csv"
    return len(metrics.read_text().splitlines()) - 1 if metrics.exists() else 0


def started(run):
    # A folder that holds a run is never written to: --ckpt_path last goes on, or starts.
    return subprocess.Popen([*fit, *settings, "--trainer.default_root_dir", run, *last])


# %%
# Two runs of one command, at the same time. The second is killed after its sixth round.
last = ["--ckpt_path", "last"]
quiet = started(folder / "undisturbed")
killed = started(folder / "killed")
while rounds_of(folder / "killed") < 6 and killed.poll() is None:
    time.sleep(0.01)
killed.kill()
killed.wait()
done = rounds_of(folder / "killed")
before = fl_lightning.load(folder / "killed").metrics["val/acc"]
assert quiet.wait() == 0

# %%
# The folder stands for the run: its config, and its last checkpoint.
subprocess.run([*fit, folder / "killed"], check=True)

# %%
# Models and the clients' rows are compared bit by bit.
runs = [fl_lightning.load(folder / name) for name in ("undisturbed", "killed")]
weights = [parameters_to_vector(run.learner.parameters()) for run in runs]


def kept_by_clients(run):
    """What SCAFFOLD keeps of each client."""
    return [run.client_state("ControlVariates.c_i", client) for client in range(10)]


rows = [kept_by_clients(run) for run in runs]
equal = torch.equal(*weights) and all(map(torch.equal, *rows))

figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
rounds = range(1, 21)
axes.plot(rounds, runs[0].metrics["val/acc"], "C0-", lw=5, alpha=0.35, label="undisturbed")
axes.plot(rounds, runs[1].metrics["val/acc"], "k--", lw=1.2, label="killed and resumed")
axes.axvline(done, color="C3", ls=":", label=f"SIGKILL after round {done}")
axes.set(title="A run that was killed, and one that was not", xlabel="round")
axes.set_ylabel("test accuracy")
axes.set_xticks(range(0, 21, 5))
axes.legend(loc="lower right")
axes.grid(alpha=0.3)
figure.savefig(folder / "resumed.png", dpi=150)

print(
    f"Killed after round {done} of 20 and resumed: {'all' if equal else 'NOT all'} of the "
    f"{len(weights[0]):,} weights and of the 10 clients' rows have the same bits."
)
