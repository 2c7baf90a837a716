"""
A privacy budget
================

Client-level differential privacy: updates are clipped, and the server adds noise to their sum. The
noise is chosen such that 10 rounds stay within a budget of epsilon. What does a smaller budget
cost?
"""

# %%
# Each of 100 clients takes part by its own coin, which the guarantee needs. Noise and coins come
# from the operating system, so that no two runs have the same.
from pathlib import Path

import matplotlib.pyplot as plt
import pytorch_lightning as pl

import fl_lightning
from fl_lightning import FederatedModule, MetricsCSV
from fl_lightning.callbacks import DifferentialPrivacy
from fl_lightning.datamodules import Digits
from fl_lightning.models import MLP, Classifier

folder = Path("runs/examples/privacy_budget")


def run(name, method):
    """The metrics of 10 rounds."""
    pl.seed_everything(0)
    trainer = pl.Trainer(
        max_epochs=10,
        accelerator="cpu",
        callbacks=[method],
        logger=MetricsCSV(folder / name),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    learner = Classifier(MLP([64, 10]), num_classes=10, lr=0.1)
    module = FederatedModule(
        learner, participation=0.3, sampling="poisson", local_epochs=2, buffers="keep"
    )
    trainer.fit(module, Digits(num_clients=100, batch_size=8))
    return fl_lightning.load(folder / name).metrics


# %%
# Without ``noise_multiplier`` it is the least that keeps all rounds within ``target_epsilon``.
budgets = {"strict": 1.0, "loose": 8.0}
runs = {
    name: run(name, DifferentialPrivacy(clip=1.0, target_epsilon=budget, delta=1e-3))
    for name, budget in budgets.items()
}
runs["none"] = run("none", DifferentialPrivacy(clip=1.0, noise_multiplier=0.0))

# %%
# ``privacy/epsilon`` is what the rounds so far have spent.
figure, (above, below) = plt.subplots(
    2, 1, figsize=(6, 5), sharex=True, height_ratios=(3, 2), layout="constrained"
)
for name, metrics in runs.items():
    label = f"budget ε = {budgets[name]:g}" if name in budgets else "no noise"
    above.plot(range(1, 11), metrics["val/acc"], label=label)
    if name in budgets:
        below.plot(range(1, 11), metrics["privacy/epsilon"])
        below.axhline(budgets[name], color="gray", ls=":", lw=1)
above.set(title="What a privacy budget costs (δ = 0.001)", ylabel="test accuracy")
above.legend()
below.set(xlabel="round", ylabel="ε spent", ylim=(0, None))
figure.savefig(folder / "budget.png", dpi=150)

spent = {name: runs[name]["privacy/epsilon"][-1] for name in budgets}
reached = {name: metrics["val/acc"][-1] for name, metrics in runs.items()}
print(
    f"With epsilon = {spent['strict']:.2f} the accuracy is {reached['strict']:.1%}, with "
    f"epsilon = {spent['loose']:.2f} {reached['loose']:.1%}; clipped and without noise "
    f"{reached['none']:.1%}."
)
