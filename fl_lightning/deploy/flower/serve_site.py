"""A site's fit: the app's config with the site's clients, which serves a server."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fl_lightning.callback import FederatedCallback
from fl_lightning.client.batch_callbacks import gets_batches
from fl_lightning.deploy import audit
from fl_lightning.deploy.fields import LARGEST, MOST_SAMPLES
from fl_lightning.deploy.round_messages import check_names, check_shape, shape_of
from fl_lightning.deploy.site import AtSite, Ended, asks_a_stranger, numbers_of
from fl_lightning.deploy.site_data import as_one_client
from fl_lightning.deploy.transport import Message, Post
from fl_lightning.errors import UserError
from fl_lightning.evaluation.evaluator import VALIDATION
from fl_lightning.lab.cli.cli import CommandCLI
from fl_lightning.lab.cli.compose import Command, plain_yaml, prepare
from fl_lightning.lab.cli.lightning_commands import quiet

# A site writes only its rows, does not validate, and is one process.
_OPTIONS = {
    "logger": "false",
    "enable_checkpointing": "false",
    "enable_progress_bar": "false",
    "num_sanity_val_steps": "0",
    "limit_val_batches": "0",
    "devices": "1",
    "num_nodes": "1",
}
FEWEST_SAMPLES = 10  # of a site's own data, if its site.yaml does not say it


class Peeked:
    """A post whose first message has been read in advance."""

    def __init__(self, post: Post, first: Message) -> None:
        self.post = post
        self.first: Message | None = first

    def take(self) -> Message | None:
        message = self.first
        self.first = None
        return self.post.take() if message is None else message

    def give(self, answer: Message) -> None:
        self.post.give(answer)


def serve(
    app: Path, folder: Path, clients: str, site: Path | None, rounds: int, post: Post
) -> None:
    """Answer the server's messages until there are no more.

    Args:
        rounds: of the server's run. A learner's schedule may read ``trainer.max_epochs`` when the
            fit starts, before any message says it.

    Raises:
        UserError: the user has to correct the site's settings.
    """
    quiet()
    for place in (str(Path.cwd()), str(app)):
        sys.path.insert(0, place)
    first = post.take()
    # After a restart the server has to greet this process first, so that its data are compared.
    while first is not None and asks_a_stranger(first):
        question = first.numbers.get("question")
        answered = {} if question is None else {"question": question}
        lost = Message("lost", first.site, answered)
        audit.note(folder, first, lost)
        post.give(lost)
        first = post.take()
    if first is None:
        return
    arguments = ["-c", str(app / "config.yaml"), "--trainer.default_root_dir", str(folder)]
    for name, value in {**_OPTIONS, "max_epochs": str(rounds)}.items():
        arguments += [f"--trainer.{name}", value]
    prepared = prepare("site", arguments)
    if site is None:
        # Clients of the config's partition send all metrics, as in a simulation.
        numbers = list(numbers_of(clients))
        limits = SiteLimits(fewest_samples=0)
    else:
        client, limits = own_data(prepared, site)
        numbers = [client]
    try:
        cli = CommandCLI("site", prepared)
    except UserError:
        # A network for the server's columns would not fit this site's data. An error about the
        # columns says more than one about shapes.
        if site is not None:
            of_data = prepare("partition", arguments[:2])
            own_data(of_data, site)
            check_own(first, CommandCLI("partition", of_data).datamodule)
        raise
    if site is not None:
        check_own(first, cli.datamodule)
    # Without this check the learner's first step would fail, and name neither the column nor the
    # site.
    if "shape" in first.arrays:
        check_shape("the server's data", first.arrays["shape"], cli.datamodule)
    trainer: Any = cli.trainer
    own = site is not None
    peeked = Peeked(post, first)
    at = AtSite(peeked, numbers, folder, own, limits.fewest_samples, limits.most_rounds)
    trainer.callbacks = [*filter(runs_at_sites, trainer.callbacks), at]
    with suppress(Ended):
        trainer.fit(cli.model, cli.datamodule)


def runs_at_sites(callback: Any) -> bool:
    """Return whether a site has to call this callback: a method, or one that reads clients'
    batches.

    The user's other callbacks belong to the run, and the server calls them.
    """
    reads_batches = gets_batches(callback) or gets_batches(callback, VALIDATION)
    return isinstance(callback, FederatedCallback) or reads_batches


def check_own(first: Message, data: Any) -> None:
    """Make a site's own data the data of one client, and compare its names with those of the first
    message.

    Raises:
        UserError: columns or classes are missing, too many or in another order.
    """
    as_one_client(data, int(first.numbers.get("m", 1)))
    shape_of(data, 0)  # which reads them
    check_names(first.arrays, data)


@dataclass(frozen=True)
class SiteLimits:
    """What a site's own file limits.

    Args:
        fewest_samples: metrics of fewer samples stay at the site.
        most_rounds: the number of rounds in which the site takes part; None: any number.
    """

    fewest_samples: int = FEWEST_SAMPLES
    most_rounds: int | None = None

    @classmethod
    def of(cls, document: dict[str, Any], where: str) -> SiteLimits:
        """Read the limits from a site's file.

        Raises:
            UserError: a limit is not a whole number that can be one.
        """
        fewest = document.get("fewest_samples", FEWEST_SAMPLES)
        if not _whole(fewest, 0, MOST_SAMPLES):
            raise UserError(
                f"{where}: fewest_samples is {fewest!r}; give a whole number. Metrics of fewer "
                "samples stay at this site. 0: all metrics are sent."
            )
        most = document.get("most_rounds")
        if most is not None and not _whole(most, 1, LARGEST):
            raise UserError(
                f"{where}: most_rounds is {most!r}; give the number of rounds in which this site "
                "takes part, or leave it out for any number."
            )
        return cls(fewest, most)


def _whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def own_data(prepared: Command, path: Path) -> tuple[int, SiteLimits]:
    """Put a site's own data in place of the config's.

    Returns:
        The ID of the site's client, and the limits of the site's file.

    Raises:
        UserError: the file does not exist, or has other keys.
    """
    where = f"--node-config site={str(path)!r}"
    try:
        document = plain_yaml(path.read_text("utf-8"), where)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{where}: this file cannot be read ({error}).") from None
    keys = set(document) if isinstance(document, dict) else set()
    if not {"client", "data"} <= keys <= {"client", "data", "fewest_samples", "most_rounds"}:
        has = ", ".join(map(str, document)) if isinstance(document, dict) else "something else"
        raise UserError(
            f"{where}: it holds {has or 'nothing'}; accepted are two keys: client (this site's "
            "number) and data (a class_path with its init_args). You can add fewest_samples "
            f"({FEWEST_SAMPLES} without it) and most_rounds (any number without it)."
        )
    limits = SiteLimits.of(document, where)
    client = document["client"]
    if isinstance(client, bool) or not isinstance(client, int) or client < 0:
        raise UserError(f"{where}: client is {client!r}; give this site's number: 0, 1, …")
    data = document["data"]
    if isinstance(data, dict) and isinstance(data.get("init_args"), dict):
        # The site is one client, whatever the run's partition is.
        left = {k: v for k, v in data["init_args"].items() if k not in ("num_clients", "partition")}
        data = {**data, "init_args": left}
    prepared.config["data"] = data
    return client, limits
