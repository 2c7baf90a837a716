"""Every command of ``fl-lightning``: its line of help, and the module of its own parser."""

from __future__ import annotations

COMMANDS = {
    "fit": "train federatedly: -c base -c data/digits -c method/fedinit",
    "resume": "go on with a run from its last checkpoint: resume RUN --trainer.max_epochs 30",
    "validate": "evaluate a run's last checkpoint on the validation data",
    "test": "evaluate a run's last checkpoint on the test data",
    "predict": "write a run's predictions to a file",
    "export": "write a run's global model as one file of plain PyTorch",
    "partition": "show who has which data: a table, its hash, partition.png and partition.npz",
    "configs": "list the packaged configs, or print one",
    "sweep": (
        "run a grid of settings and seeds, several at once: sweep FILE; again, to go on with it"
    ),
    "report": (
        "compare runs: tables, curves, paired intervals and verdicts, as one page and as files"
    ),
    "analyse": "look at a run's model: analyse hessian RUN, analyse landscape RUN [RUN2]",
    "new": "write a package with a method of your own, to be changed: new own-anchor",
    "cite": "print BibTeX of the methods and the data of a run: cite RUN",
    "deploy": (
        "write an app for sites that keep their data, or keys for them: "
        "deploy flower base data/digits"
    ),
    "site": "a site's process, which such an app starts itself",
    "check": "put a method through the contracts: check ControlVariates, check my_module.MyMethod",
}

# These commands have their own parser.
MODULES = {
    "check": "fl_lightning.lab.cli.check_command",
    "new": "fl_lightning.lab.cli.new_command",
    "cite": "fl_lightning.lab.cli.cite_command",
    "report": "fl_lightning.lab.report.report_command",
    "analyse": "fl_lightning.lab.analysis.analyse_command",
    "sweep": "fl_lightning.lab.sweep.sweep_command",
    "deploy": "fl_lightning.deploy.flower.deploy_command",
    "site": "fl_lightning.deploy.flower.resident",
}
