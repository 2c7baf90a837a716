"""The server of a Flower app: a fit whose messages are carried by Flower's grid."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from fl_lightning.deploy.flower import app
from fl_lightning.deploy.flower.app import AppSettings
from fl_lightning.deploy.flower.resident import end_with
from fl_lightning.deploy.transport import Message, Transport, packed, visible, words
from fl_lightning.errors import UserError

# Flower's codes for errors in an app: it cannot be loaded, it raised, or its bundle was rejected.
# Other codes mean that a node, a process or a message is gone.
_OF_THE_APP = (1, 2, 7)
_SOON, _LATER = 0.1, 1.0  # seconds between questions for answers


class GridTransport:
    """Messages carried by Flower's ``Grid``; a site's name is its node's number."""

    def __init__(self, grid: Any) -> None:
        self.grid = grid
        self._site_of: dict[str, str] = {}  # number of a message without an answer → site

    def sites(self) -> list[str]:
        return sorted(str(node) for node in self.grid.get_node_ids())

    def send(self, messages: list[Message]) -> None:
        from flwr.app import Message as FlowerMessage
        from flwr.app import MessageType

        for message in messages:
            # An answer to an earlier question to this site is no longer of use.
            self._site_of = {k: site for k, site in self._site_of.items() if site != message.site}
            of_flower = FlowerMessage(
                app.content(packed(message)),
                dst_node_id=int(message.site),
                message_type=MessageType.TRAIN,
                group_id=str(message.numbers.get("round", message.what)),
            )
            # Push messages one by one, because Flower limits the size of a request.
            for number in self.grid.push_messages([of_flower]):
                self._site_of[number or f"lost {message.site}"] = message.site

    def receive(self, timeout: float) -> list[Message]:
        until = time.monotonic() + timeout
        pause = _SOON
        while True:
            came = self._answers()
            left = until - time.monotonic()
            if came or left <= 0:
                return came
            time.sleep(min(pause, left))
            pause = min(1.5 * pause, _LATER)

    def _answers(self) -> list[Message]:
        lost = [number for number in self._site_of if number.startswith("lost ")]
        came = [Message("lost", self._site_of.pop(number)) for number in lost]
        if self._site_of:
            for reply in self.grid.pull_messages(list(self._site_of)):
                site = self._site_of.pop(reply.metadata.reply_to_message_id, None)
                if site is not None:
                    came.append(_opened(reply, site))
        return came


def _opened(reply: Any, site: str) -> Message:
    """Return a site's answer; ``lost`` if Flower says that there will be no answer, ``refused`` if
    the site does not run the app.
    """
    if not reply.has_error():
        return app.message_in(reply.content, site)
    if reply.error.code not in _OF_THE_APP:
        return Message("lost", site)
    text = (
        f"Flower could not run the app there ({visible(reply.error.reason, 300)}). fl-lightning, "
        "and what the app's own modules import, have to be installed at every site."
    )
    return Message("refused", site, arrays={"text": np.array(words(text))})


def serve(grid: Any, context: Any, file: str) -> None:
    """Run the app's config as the server of its sites, in an ordinary run's folder.

    Args:
        file: ``__file__`` of the app's server_app.py.

    Raises:
        UserError: the user has to correct something, here or at a site.
        RuntimeError: the run diverged, or was stopped.
    """
    # Without this link to its parent, the server would wait for answers that cannot arrive.
    end_with(os.getppid())
    settings = AppSettings(context.run_config)
    try:
        status = fit(Path(file).resolve().parents[1], GridTransport(grid), settings)
    except UserError as error:
        # Flower would print the traceback, which does not help the user.
        raise UserError(str(error)) from None
    if status:
        raise RuntimeError(f"the run ended with status {status}; the reason is in the lines above")


# A callback that every other run has. At sites it would send more numbers than the run itself.
STAYS_AWAY = ("DivergenceLogger",)


def fit(app: Path, transport: Transport, settings: AppSettings) -> int:
    """Fit the app in this folder, and return the exit status of ``fl-lightning fit``."""
    from fl_lightning.deploy.at_server import AtServer
    from fl_lightning.lab.cli import lightning_commands
    from fl_lightning.lab.cli.compose import prepare

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
