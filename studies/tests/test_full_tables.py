"""The packaged sweeps over the papers' whole tables."""

from __future__ import annotations

import re

import pytest

from fl_lightning.lab.cli.compose import packaged
from fl_lightning.lab.sweep.grid import arms
from fl_lightning.lab.sweep.sweep_file import read_spec

FULL = sorted(
    name for name in packaged() if name.startswith("experiment/") and name.endswith("-full")
)


@pytest.mark.parametrize("name", FULL)
def test_an_arm_of_a_whole_table_is_a_setting_of_the_paper_with_the_fragment_that_belongs_to_it(
    name: str,
) -> None:
    spec = read_spec(name)
    assert spec.seeds == [0, 1, 2]
    paper = "/".join(name.split("/")[:2])
    for arm in arms(spec):
        setting, method = [config for config in arm.configs if config.startswith("experiment/")]
        assert setting in packaged() and method in packaged(), arm
        assert setting.startswith(f"{paper}/table1-") and method.startswith(f"{paper}/method/")
        fragment = method.rpartition("/")[2]
        variants = [
            own
            for own, where in (("200", "-200"), ("cifar100", "-cifar100-"), ("vgg11", "-vgg11"))
            if where in setting and f"{paper}/method/{plain(fragment)}-{own}" in packaged()
        ]
        assert fragment == "-".join([plain(fragment), *variants]), (setting, method)


def plain(fragment: str) -> str:
    return re.sub(r"-(200|cifar100|vgg11)$", "", fragment)


def test_the_whole_tables_are_whole() -> None:
    """Each packaged setting of a table is in a sweep.

    FedALS's Tables 2 and 3 are of its Table 1's settings.
    """
    used = {config for name in FULL for arm in arms(read_spec(name)) for config in arm.configs}
    settings = {
        name
        for name in packaged()
        if re.match(r"experiment/\w+/table1-", name)
        and not name.endswith(("-small", "-full", ".claims"))
    }
    assert settings <= used
    assert sum(len(arms(read_spec(name))) for name in FULL if "/fedinit/" in name) == 16 * 7
    assert sum(len(arms(read_spec(name))) for name in FULL if "/fedsmoo/" in name) == 16 * 8
