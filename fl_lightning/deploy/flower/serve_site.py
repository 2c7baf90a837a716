"""A site's fit: the app's config with the site's clients, which serves a server."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from fl_lightning.callback import FederatedCallback
from fl_lightning.client.batch_callbacks import gets_batches
from fl_lightning.deploy import what_leaves
from fl_lightning.deploy.round_messages import check_names, check_shape, shape_of
from fl_lightning.deploy.site import AtSite, Ended, numbers_of
from fl_lightning.deploy.site_data import as_one_client
from fl_lightning.deploy.transport import Message, Post
from fl_lightning.errors import UserError
from fl_lightning.evaluation.evaluator import VALIDATION
from fl_lightning.introspection.accepted import NonNegativeInt, check
from fl_lightning.lab.cli.cli import CommandCLI
from fl_lightning.lab.cli.compose import Command, plain_yaml, prepare, text_of
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


def serve(
    app: Path, folder: Path, clients: str, site: Path | None, rounds: int, post: Post
) -> None:
    """Answer the server's messages until there are no more.

    Args:
        rounds: of the server's run. A learner's schedule may read ``trainer.max_epochs`` when the
            fit starts, before any message says it.
    """
    quiet()
    for place in (str(Path.cwd()), str(app)):
        sys.path.insert(0, place)
    first = post.take()
    # After a restart the server has to greet this process first, so that its data are compared.
    while first is not None and first.what != "hello":
        lost = Message("lost", first.site)
        if "question" in first.numbers:
            lost.numbers["question"] = first.numbers["question"]
        what_leaves.note(folder, first, lost)
        post.give(lost)
        first = post.take()
    if first is None:
        return
    arguments = ["-c", str(app / "config.yaml"), "--trainer.default_root_dir", str(folder)]
    for name, value in {**_OPTIONS, "max_epochs": str(rounds)}.items():
        arguments += [f"--trainer.{name}", value]
    prepared = prepare("site", arguments)
    # Clients of the config's partition send all metrics, as in a simulation.
    numbers, fewest = (numbers_of(clients), 0) if site is None else own_data(prepared, site)
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
    at = AtSite(post, numbers, folder, site is not None, fewest, first)
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
    """
    as_one_client(data, int(first.numbers.get("m", 1)))
    shape_of(data, 0)  # which reads them
    check_names(first.arrays, data)


def own_data(prepared: Command, path: Path) -> tuple[list[int], int]:
    """Put a site's own data in place of the config's.

    Returns:
        The ID of the site's client, and the number of samples of which metrics may leave the site.
    """
    where = f"--node-config site={str(path)!r}"
    document = plain_yaml(text_of(path, where), where)
    keys = set(document) if isinstance(document, dict) else set()
    if not {"client", "data"} <= keys <= {"client", "data", "fewest_samples"}:
        raise UserError(
            f"{where}: it needs two keys, and has {', '.join(map(str, keys)) or 'none'}: client "
            "(this site's number: 0, 1, …) and data (a class_path with its init_args). You can add "
            f"fewest_samples ({FEWEST_SAMPLES} without it): metrics of fewer samples stay at this "
            "site; 0: all are sent."
        )
    document = {"fewest_samples": FEWEST_SAMPLES, **document}
    for name in ("client", "fewest_samples"):
        check(f"{where}: {name}", document[name], NonNegativeInt)
    data = document["data"]
    if isinstance(data, dict) and isinstance(data.get("init_args"), dict):
        # The site is one client, whatever the run's partition is.
        left = {k: v for k, v in data["init_args"].items() if k not in ("num_clients", "partition")}
        data = {**data, "init_args": left}
    prepared.config["data"] = data
    return [document["client"]], document["fewest_samples"]
