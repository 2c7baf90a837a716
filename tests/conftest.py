"""One thread, and ``cli``: real processes of the command line without its seconds of imports."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.register_assert_rewrite("tests.helpers", "tests.oracles")

from tests.helpers import other_lightning  # noqa: E402

if os.environ.get("FL_LIGHTNING_TESTS") == "lightning":  # `make test-lightning`
    other_lightning.stand_in()

from fl_lightning.engines.door import why_closed  # noqa: E402
from fl_lightning.machine.processes import usable_cores  # noqa: E402
from tests.helpers.zygote import Cli, Zygote, remember_packages  # noqa: E402
from tests.tiers import WHOLE, tier  # noqa: E402

torch.set_num_threads(1)

remember_packages()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """As many processes as cores and one more, which works while another's test waits."""
    return usable_cores() + 1


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Thousands of tests and the modules behind them: nothing of these is garbage.

    Each fit leaves some; to look for it after every 700 objects takes a tenth of the suite's time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the whole tier and the parametrized cases of the fast ways.

    The latter are skipped where these are switched off.
    """
    closed = why_closed()
    for item in items:
        if tier(item.nodeid, item.get_closest_marker("slow") is not None) == WHOLE:
            item.add_marker(WHOLE)
        given = vars(item).get("callspec")
        params = {} if given is None else given.params
        if params.get("capture") is True or any(map(asks_for_a_fast_way, params.values())):
            item.add_marker("fast")
        if closed and item.get_closest_marker("fast"):
            item.add_marker(pytest.mark.skip(reason=closed))


def asks_for_a_fast_way(value: object) -> bool:
    """Tell whether a parameter of a test is the stacked engine, or settings with a fast way."""
    if isinstance(value, dict):
        return value.get("engine") == "stacked" or value.get("capture") is True
    return value == "stacked" if isinstance(value, str) else False


SHARED = pytest.StashKey[Zygote]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Side by side, all processes share one that forks, which imports while they collect."""
    if SHARED not in node.config.stash:
        node.config.stash[SHARED] = Zygote()
    node.workerinput["zygote"] = str(node.config.stash[SHARED].folder)


def pytest_unconfigure(config: pytest.Config) -> None:
    if SHARED in config.stash:
        config.stash[SHARED].close()


@pytest.fixture(scope="session")
def zygote(request: pytest.FixtureRequest) -> Iterator[Zygote]:
    """One process that has imported everything and forks for each command."""
    given: dict[str, str] = getattr(request.config, "workerinput", {})
    process = Zygote(given.get("zygote"))
    yield process
    process.close()


@pytest.fixture
def python(zygote: Zygote) -> str:
    """For ``sys.executable``, where a fresh interpreter is not the point."""
    return str(zygote.python)


@pytest.fixture
def bare_python(zygote: Zygote) -> str:
    """The same, which has imported no Lightning yet."""
    return str(zygote.bare_python)


@pytest.fixture
def cli(zygote: Zygote, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """``cli("fit", "-c", "base", …)`` runs fl-lightning in ``tmp_path``.

    ``cli.start(…)`` does not wait for it.
    """
    runner = Cli(zygote, tmp_path, tmp_path_factory.mktemp("commands"))
    yield runner
    runner.kill_all()


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of FL_LIGHTNING_DATA, else one unpacked once from data beside the checkout."""
    if "FL_LIGHTNING_DATA" in os.environ:
        return Path(os.environ["FL_LIGHTNING_DATA"]).absolute()
    unpack = Path(__file__).parents[2] / "shared" / "data" / "unpack.py"
    if not unpack.is_file():
        pytest.skip(
            "no real data: set FL_LIGHTNING_DATA to a folder of MNIST, CIFAR-10, … to run this"
        )
    folder = Path(tempfile.gettempdir()) / "fl-lightning-data"
    subprocess.run([sys.executable, str(unpack), str(folder)], check=True, capture_output=True)
    return folder
