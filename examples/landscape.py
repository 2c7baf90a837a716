"""
Loss landscapes
===============

Two methods, two models: how does the loss look around each? ``fl-lightning analyse landscape``
evaluates it on a plane of random directions, with one scale for both.
"""

# %%
# FedAvg, and FedSAM, which seeks places where the loss stays low all around.
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

folder = Path("runs/examples/landscape")
program = [sys.executable, "-m", "fl_lightning"]
settings = ["-c", "base", "-c", "data/digits", "-c", "trainer/cpu"]
settings += ["--trainer.max_epochs", "15", "--model.engine", "sequential", "--ckpt_path", "last"]
methods = {
    "FedAvg": ["-c", "method/fedavg"],
    "FedSAM": ["-c", "method/fedsam", "--method.radius", "0.3"],
}
fits = []
for name, method in methods.items():
    place = ["--trainer.default_root_dir", folder / name]
    fits.append(subprocess.Popen([*program, "fit", *settings, *method, *place]))
assert [fit.wait() for fit in fits] == [0, 0]

# %%
# The picture is ``landscape.png``, its numbers are ``landscape.json``.
look = [*program, "analyse", "landscape", folder / "FedAvg", folder / "FedSAM"]
look += ["--out", folder, "--points", "15", "--samples", "500"]
subprocess.run(look, check=True)
plt.figure(figsize=(8, 6.4), layout="constrained")
plt.imshow(plt.imread(folder / "landscape.png"))
plt.axis("off")

# %%
# One number for a plane: by how much the loss is higher there, on average, than at the model.
runs = json.loads((folder / "landscape.json").read_text())["runs"]
avg, sam = (np.mean(run["losses"]) - run["loss"] for run in runs)

print(
    f"Around FedAvg's model the loss is higher by {avg:.3f} on average, around FedSAM's by "
    f"{sam:.3f}."
)
