"""One thread, and ``cli``: real processes of the command line without its seconds of imports."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("tests.helpers", "tests.oracles")

# An example takes longer if the machine is busy.
settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")

from tests.helpers import other_lightning  # noqa: E402
from tests.helpers.zygote import Cli, Zygote, remember_packages  # noqa: E402
from tests.tiers import WHOLE, nothing_fast, tier  # noqa: E402

ROOT = Path(__file__).parents[1]
OTHER_LIGHTNING = os.environ.get("FL_LIGHTNING_TESTS") == "lightning"  # `make test-lightning`


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """As many processes as cores and one more, which works while another's test waits."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_configure(config: pytest.Config) -> None:
    """Import what every test needs, but not in the process that only deals tests to others."""
    given: dict[str, str] = getattr(config, "workerinput", {})
    if "executable" in given:
        sys.executable = given["executable"]  # that of the process it was forked from is another
    if given or config.getoption("dist", "no") == "no":
        import_what_tests_share()


@cache
def import_what_tests_share() -> None:
    if OTHER_LIGHTNING:
        other_lightning.stand_in()
    import torch

    torch.set_num_threads(1)
    remember_packages()


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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """For the fast tier, leave files unread of which it has no test."""
    if config.option.markexpr != f"not {WHOLE}" or not collection_path.is_relative_to(ROOT):
        return None
    return nothing_fast(collection_path.relative_to(ROOT).as_posix()) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the whole tier."""
    for item in items:
        if tier(item.nodeid, item.get_closest_marker("slow") is not None) == WHOLE:
            item.add_marker(WHOLE)


SHARED = pytest.StashKey[Zygote]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Side by side, all processes share one that forks, and are themselves forked from it.

    So torch, Lightning and what these import are read once. (Which Lightning is settled by then.)
    """
    config.stash[SHARED] = Zygote()
    for spec in specs:
        spec.python = None if OTHER_LIGHTNING else str(config.stash[SHARED].python)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["zygote"] = str(node.config.stash[SHARED].folder)
    node.workerinput["executable"] = sys.executable


def pytest_unconfigure(config: pytest.Config) -> None:
    if SHARED in config.stash:
        config.stash[SHARED].close()


@pytest.fixture(autouse=True)
def no_seed_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the seed that ``seed_everything`` of an earlier test left in the environment."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "")  # so that what this test sets goes with it
        monkeypatch.delenv(name)


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
