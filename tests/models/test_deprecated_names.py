"""Old names of learners work for one version, with a warning that says what to write."""

from __future__ import annotations

import pytest
import yaml

from fl_lightning import models
from fl_lightning.lab.cli.classes import full_paths
from tests.helpers.zygote import Cli

WRITE = "ImageClassifier is now called Classifier: write Classifier"


def test_an_old_name_is_the_new_class_and_warns() -> None:
    with pytest.warns(FutureWarning, match=WRITE):
        assert models.ImageClassifier is models.Classifier


@pytest.mark.parametrize("old", ["ImageClassifier", "fl_lightning.models.ImageClassifier"])
def test_an_old_name_in_a_config_becomes_the_new_one(old: str) -> None:
    with pytest.warns(FutureWarning, match=WRITE):
        expected = {"learner": {"class_path": "fl_lightning.models.Classifier"}}
        assert full_paths({"learner": {"class_path": old}}) == expected


def test_an_old_name_on_the_command_line(cli: Cli) -> None:
    done = cli("fit", "-c", "base", "--model.learner", "ImageClassifier", "--print_config")
    assert done.returncode == 0 and WRITE in done.stderr, done.stderr
    learner = yaml.safe_load(done.stdout)["model"]["learner"]
    assert learner["class_path"] == "fl_lightning.models.Classifier"
