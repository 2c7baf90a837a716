"""The server and each site need the same version, sizes, settings, methods, frozen weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fl_lightning.checkpoint import Identity
from fl_lightning.deploy.progress import checksums
from fl_lightning.deploy.round_messages import shape_of
from fl_lightning.errors import UserError
from fl_lightning.record.description import version_of

# A learner's schedule, and what is inside it, may depend on the number of local steps, which a
# site's own data decide.
SCHEDULER = "client_scheduler"
# Options of an optimizer that choose a kernel of the device.
KERNELS = ("foreach", "fused", "capturable")


def config_of(run: Any, data: Any, client: int = 0) -> dict[str, dict[str, Any]]:
    """Return what a run and a site compare, by kind and name, of numbers and texts.

    Left out are the data but for their sizes, precision and devices; frozen weights that the run
    changes, because a site is sent these; and callbacks that only measure, and only at the server.

    Args:
        client: a client that has samples.
    """
    methods = run.methods
    apart = {type(each).__name__ for each in methods.callbacks if _only_at_server(each)}
    stateful = {name: own for name, own in methods.fingerprint().items() if name not in apart}
    changed = () if run.state.base is None else run.state.base.values
    arguments = {
        "fl-lightning": version_of("fl-lightning") or "not installed",
        "the model's parameters": str(run.model.layout.size),
        "the shape of a sample's x": str(shape_of(data, client)),
        "classes": str(data.num_classes or 0),
        **run.settings.compared(),
        **run.optimizers.accounts,
        "methods without state": methods.stateless(),
    }
    if methods.protects_samples:
        # How many samples a step takes, which ε depends on.
        arguments["data.batch_size"] = str(data.most_in_batch)
    return {
        "arguments": arguments,
        "methods": stateful,
        "frozen": checksums(run.model.learner, {*changed, *run.model.as_buffers}),
    }


def check_same(site: str, ours: Mapping[str, Any], theirs: Mapping[str, Any], own: bool) -> None:
    """Compare the server's config with a site's.

    Args:
        site: the site's name.
        ours, theirs: as :func:`config_of` returns them, at the server and at the site.
        own: whether the site has its own data.
    """
    server, there = (Identity(0, each["arguments"], each["methods"], "") for each in (ours, theirs))
    differing = [each for each in server.differing(there) if not _may_differ(each[0], own)]
    if differing:
        shown = "; ".join(
            f"{name}: {one} there, {other} here" for name, one, other in differing[:4]
        )
        raise UserError(
            f"site {site}: its settings or data differ from the server's ({shown}). Server and "
            "site need the same config and version, and the same columns and classes (FromTable: "
            "classes: [no, yes] names them all)."
        )
    frozen = theirs["frozen"]
    other = [name for name, mark in ours["frozen"].items() if frozen.get(name, mark) != mark]
    if other:
        more = f" and {len(other) - 1} more" * (len(other) > 1)
        raise UserError(
            f"site {site}: its frozen parameter {other[0]}{more} has other values than the "
            "server's. Frozen parameters are not sent: server and site need the same file of "
            "pretrained weights."
        )


def _only_at_server(callback: Any) -> bool:
    """Return whether a callback measures, and has no state at clients."""
    measures = callback.role == "measurement"
    return measures and all(each.at_server for each in callback.declarations().values())


def _may_differ(name: str, own: bool) -> bool:
    """Return whether a setting may have another value at a site; ``own``: with its own data."""
    return name.rpartition(".")[2] in KERNELS or (own and name.startswith(SCHEDULER))
