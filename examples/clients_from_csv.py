"""
Natural clients from a CSV
==========================

A file in which a column says whose each row is. Eight hospitals train one model of an outcome; and
then each trains one alone, to see what taking part is worth to it.
"""

# %%
# The file is made up here. Hospitals differ in size and in the ages of their patients.
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytorch_lightning as pl

from fl_lightning import FederatedModule
from fl_lightning.callbacks import PartialAveraging, PerClientEvaluation
from fl_lightning.datamodules import FromTable
from fl_lightning.models import MLP, Classifier

folder = Path("runs/examples/clients_from_csv")
folder.mkdir(parents=True, exist_ok=True)
rng = np.random.default_rng(0)
lines = ["hospital,age,pressure,glucose,marker,outcome"]
for number, patients in enumerate((200, 160, 120, 80, 60, 50, 40, 40)):
    age = rng.normal(0.3 * number - 1, 1, patients)
    pressure, glucose, marker = rng.standard_normal((3, patients))
    risk = age * marker + glucose**2 - 1 + 0.5 * pressure
    sick = risk + 0.3 * rng.standard_normal(patients) > 0
    table = zip(age, pressure, glucose, marker, sick, strict=True)
    lines += [f"site-{number},{a:.3f},{p:.3f},{g:.3f},{m:.3f},{s:d}" for a, p, g, m, s in table]
(folder / "patients.csv").write_text("\n".join(lines) + "\n")


# %%
# ``client`` names the column of the clients, ``target`` the one to predict.
# The others are features.
# Each hospital holds a quarter of its patients out.
def accuracies(*method):
    """The accuracy of each hospital's model on its own patients, by hospital."""
    pl.seed_everything(0)
    by_client = PerClientEvaluation()
    data = FromTable(
        folder / "patients.csv",
        target="outcome",
        client="hospital",
        batch_size=20,
        client_test_fraction=0.25,
    )
    learner = Classifier(MLP([4, 32, 2]), num_classes=2, lr=0.2)
    trainer = pl.Trainer(
        max_epochs=30,
        accelerator="cpu",
        callbacks=[by_client, *method],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = FederatedModule(learner, participation="all", local_epochs=2, weighting="samples")
    trainer.fit(module, data)
    return data.client_names, np.array(list(by_client.table["acc"].values())), by_client.samples


# %%
# Where nothing is averaged, each hospital trains alone.
names, together, tested = accuracies()
_, alone, _ = accuracies(PartialAveraging(periods={"all": "never"}))

figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
place = np.arange(len(names))
axes.bar(place - 0.2, alone, 0.4, label=f"alone: mean {alone.mean():.1%}", color="lightgray")
axes.bar(place + 0.2, together, 0.4, label=f"together: mean {together.mean():.1%}")
axes.set_xticks(place, [f"{name}\n{tested[i]} tested" for i, name in enumerate(names)], fontsize=8)
axes.set(title="What taking part is worth to each hospital", ylabel="accuracy on own patients")
axes.set_ylim(0.4, 1.1)
axes.legend(ncols=2, loc="upper left")
figure.savefig(folder / "hospitals.png", dpi=150)

print(
    f"Together the {len(names)} hospitals are right on {together.mean():.1%} of their patients, "
    f"each alone on {alone.mean():.1%}."
)
