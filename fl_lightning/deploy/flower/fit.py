"""``fl-lightning fit`` of an app's config, over its sites."""

from __future__ import annotations

import sys
from pathlib import Path

from fl_lightning.deploy.at_server import AtServer
from fl_lightning.deploy.flower.app_settings import AppSettings
from fl_lightning.deploy.transport import Transport
from fl_lightning.lab.cli import lightning_commands
from fl_lightning.lab.cli.compose import prepare

# A callback that every other run has. At sites it would send more numbers than the run itself.
STAYS_AWAY = ("DivergenceLogger",)


def fit(app: Path, transport: Transport, settings: AppSettings) -> int:
    """Fit the app in this folder, and return the exit status of ``fl-lightning fit``.

    Raises:
        UserError: the user has to correct something.
    """
    if str(app) not in sys.path:
        sys.path.insert(0, str(app))
    options = {
        "--trainer.default_root_dir": settings.folder,
        "--trainer.max_epochs": settings.rounds,
        # The run resumes if the folder has one.
        "--ckpt_path": "last",
    }
    arguments = ["-c", str(app / "config.yaml")]
    for name, value in options.items():
        arguments += [name, str(value)]
    at = AtServer(transport, None, settings.timeout, settings.min_sites)
    return lightning_commands.run("fit", prepare("fit", arguments), added=[at], without=STAYS_AWAY)
