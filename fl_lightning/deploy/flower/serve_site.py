"""A site's fit: the app's config with the site's clients, which serves a server."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from fl_lightning.callback import FederatedCallback
from fl_lightning.cli.cli import CommandCLI
from fl_lightning.cli.commands import quiet
from fl_lightning.cli.compose import prepare
from fl_lightning.deploy.site import AtSite, Ended, numbers_of
from fl_lightning.deploy.transport import Post

# A site writes rows alone, evaluates nothing and is one process.
_OPTIONS = {
    "logger": "false",
    "enable_checkpointing": "false",
    "enable_progress_bar": "false",
    "num_sanity_val_steps": "0",
    "limit_val_batches": "0",
    "devices": "1",
    "num_nodes": "1",
}


def serve(app: Path, folder: Path, clients: str, own: Path | None, post: Post) -> None:
    """Answer the server's messages until there are no more.

    Raises:
        UserError: what the site was given is to be mended.
    """
    quiet()
    for place in (str(Path.cwd()), str(app)):
        sys.path.insert(0, place)
    numbers = list(numbers_of(clients))
    arguments = ["-c", str(app / "config.yaml"), "--trainer.default_root_dir", str(folder)]
    for name, value in _OPTIONS.items():
        arguments += [f"--trainer.{name}", value]
    cli = CommandCLI("site", prepare("site", arguments))
    trainer: Any = cli.trainer
    # The user's other callbacks are the run's, and that is the server's.
    methods = [each for each in trainer.callbacks if isinstance(each, FederatedCallback)]
    trainer.callbacks = [*methods, AtSite(post, numbers, folder)]
    with suppress(Ended):
        trainer.fit(cli.model, cli.datamodule)
