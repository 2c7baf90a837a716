"""
A search with Optuna
====================

Optuna chooses each trial's learning rate and local epochs by what the trials before it reached. A
trial that does worse than most is pruned, by a callback like any other of a Trainer. It needs
``pip install '.[optuna]'``.
"""

# %%
# The callback tells Optuna each round's validation accuracy, and ends the trial where it says so.
from pathlib import Path

import matplotlib.pyplot as plt
import optuna
import pytorch_lightning as pl

from fl_lightning import FederatedModule
from fl_lightning.datamodules import Digits, Dirichlet
from fl_lightning.models import MLP, Classifier


class Pruning(pl.Callback):
    def __init__(self, trial):
        self.trial = trial

    def on_validation_end(self, trainer, pl_module):
        self.trial.report(trainer.callback_metrics["val/acc"].item(), step=trainer.current_epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned


# %%
# A trial is one run, with the same seed and clients each time. Trials are compared on samples that
# are held out of the training data, never on the test set.
def run(trial):
    lr = trial.suggest_float("lr", 0.001, 1, log=True)
    epochs = trial.suggest_int("local_epochs", 1, 3)
    pl.seed_everything(0)
    data = Digits(num_clients=10, partition=Dirichlet(alpha=0.3), batch_size=20, val_fraction=0.2)
    learner = Classifier(MLP([64, 32, 10]), num_classes=10, lr=lr)
    module = FederatedModule(learner, participation=0.5, local_epochs=epochs, engine="sequential")
    shown = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger"), False)
    checks = {"enable_checkpointing": False, "num_sanity_val_steps": 0, "accelerator": "cpu"}
    trainer = pl.Trainer(max_epochs=6, callbacks=[Pruning(trial)], **shown, **checks)
    trainer.fit(module, data)
    accuracy = trainer.callback_metrics["val/acc"].item()
    (tested,) = trainer.test(module, data, verbose=False)
    trial.set_user_attr("test", tested["test/acc"])
    return accuracy


# %%
# The study lies in an SQLite file. Started again, the program goes on there, to twelve trials.
folder = Path("runs/examples/search_with_optuna")
folder.mkdir(parents=True, exist_ok=True)
pruner = optuna.pruners.MedianPruner(n_startup_trials=3, n_warmup_steps=1)
where = {"study_name": "digits", "storage": f"sqlite:///{folder / 'study.db'}"}
how = {"direction": "maximize", "sampler": optuna.samplers.TPESampler(seed=0), "pruner": pruner}
study = optuna.create_study(**where, **how, load_if_exists=True)
study.optimize(run, n_trials=12 - len(study.trials))

# %%
# Each line is a trial. Those that were pruned end early.
best = study.best_trial
figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
for trial in study.trials:
    values = list(trial.intermediate_values.values())
    axes.plot(range(1, len(values) + 1), values, "o-", c="C3" if trial == best else "0.6")
axes.set(title="Twelve trials, the best in red", xlabel="round", ylabel="validation accuracy")
figure.savefig(folder / "trials.png", dpi=150)

pruned = [trial for trial in study.trials if trial.state.name == "PRUNED"]
done = sum(len(trial.intermediate_values) for trial in study.trials)
print(
    f"{len(pruned)} of {len(study.trials)} trials were pruned, so that {done} of 72 rounds were "
    f"trained; the best, with {best.params['local_epochs']} local epochs at a rate of "
    f"{best.params['lr']:.2f}, is right on {best.user_attrs['test']:.1%} of the test images."
)
