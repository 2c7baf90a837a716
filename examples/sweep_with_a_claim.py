"""
A sweep with a claim
====================

What is expected is written down first, then every arm runs with the same five seeds, and the
report says whether the claim holds: an interval of the paired differences, and a verdict.
"""

# %%
# The sweep: two arms, five seeds, six rounds. Fewer than five seeds would get no verdict.
import json
import subprocess
import sys
from pathlib import Path

import matplotlib.pyplot as plt

folder = Path("runs/examples/sweep_with_a_claim")
folder.mkdir(parents=True, exist_ok=True)
(folder / "sweep.yaml").write_text("""
configs: [base, data/digits, trainer/cpu]
fixed:
  trainer.max_epochs: 6
  model.engine: sequential
  data.partition: Dirichlet
  data.partition.alpha: 0.3
grid:
  method:
    - {configs: [method/fedavg], model.local_epochs: 1, name: one-epoch}
    - {configs: [method/fedavg], model.local_epochs: 5, name: five-epochs}
  seed_everything: [0, 1, 2, 3, 4]
claims: claims.yaml
""")

# %%
# The claim, with the difference that would matter. It cannot be changed once runs have begun.
(folder / "claims.yaml").write_text("""
- id: more-work
  text: Six rounds reach more with five local epochs than with one
  a: five-epochs
  b: one-epoch
  metric: val/acc
  score: tail
  direction: greater
  margin: 0.02
""")

# %%
# The same commands as in a shell. A sweep that was stopped goes on with what is not done.
program = [sys.executable, "-m", "fl_lightning"]
sweep = folder / "sweep"
subprocess.run([*program, "sweep", folder / "sweep.yaml", "--out", sweep], check=True)
subprocess.run([*program, "report", sweep], check=True)

# %%
# ``report.html`` is the page to read; ``report.json`` holds every number of it.
(claim,) = json.loads((sweep / "report.json").read_text())["claims"]
mean, low, high = (claim[key] for key in ("mean", "low", "high"))
figure, axes = plt.subplots(figsize=(6, 3), layout="constrained")
for place, difference in enumerate(claim["values"].values()):
    axes.plot(difference, place, "o", color="C0")
axes.set_yticks([*range(5), 5.2], [*(f"seed {seed}" for seed in claim["values"]), "95% interval"])
axes.errorbar(mean, 5.2, xerr=[[mean - low], [high - mean]], fmt="D", color="k", capsize=5)
axes.axvline(0, color="gray", lw=1)
axes.axvline(0.02, color="C3", ls=":", label="what would matter: 0.02")
axes.set(title=f"Five local epochs against one: {claim['verdict']}")
axes.set_xlabel("difference in test accuracy, five epochs − one epoch")
axes.legend(fontsize=8)
figure.savefig(folder / "claim.png", dpi=150)

print(
    f"The claim is {claim['verdict']}: over {len(claim['values'])} seeds the difference is "
    f"{mean:.3f}, with a 95% interval from {low:.3f} to {high:.3f}."
)
