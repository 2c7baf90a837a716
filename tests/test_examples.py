"""Each example runs as its user runs it, draws its picture, and says what it is there to say."""

from __future__ import annotations

import os
import re
import sqlite3
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import matplotlib.image
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = pytest.mark.slow

Example = Callable[[str], tuple[str, list[float]]]


@pytest.fixture
def example(python: str, tmp_path: Path) -> Example:
    """Run an example by its name: the sentence that it ends with, and the numbers in it."""

    def run(name: str) -> tuple[str, list[float]]:
        environment = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
        command, given = [python, str(EXAMPLES / f"{name}.py")], {"cwd": tmp_path}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, **given)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        (picture,) = (tmp_path / "runs/examples" / name).glob("*.png")
        pixels = matplotlib.image.imread(picture)
        assert min(pixels.shape[:2]) > 200 and (pixels != pixels[0, 0]).any()
        sentence = done.stdout.splitlines()[-1]
        print(sentence)
        found = re.findall(r"(?<![\w.-])-?\d[\d,]*(?:\.\d+)?%?", sentence)
        return sentence, [value(text) for text in found]

    return run


def value(text: str) -> float:
    """``1,234`` is 1234, ``50%`` is 0.5."""
    number = float(text.rstrip("%").replace(",", ""))
    return number / 100 if text.endswith("%") else number


def test_the_gallery_shows_every_example_and_each_is_tested() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    shown = {path.stem for path in (EXAMPLES.parent / "docs/gallery").glob("*.txt")}
    tested = set(re.findall(r'example\("(\w+)"\)', Path(__file__).read_text("utf-8")))
    assert shown == tested == names


def test_a_first_run_learns(example: Example) -> None:
    _, numbers = example("first_run")
    first, last = numbers[:2]
    assert last > 0.85 and last > first + 0.2


def test_an_own_learner_is_exported_as_it_was_validated(example: Example) -> None:
    _, (error, variance, validated) = example("own_learner")
    assert error == validated
    assert error < 0.5 * variance


def test_an_own_method_moves_its_bound(example: Example) -> None:
    _, (start, bound, _, below, wanted) = example("own_method")
    assert (start, wanted) == (10, 0.5)
    assert bound < 1 and abs(below - wanted) <= 0.1


def test_four_methods_of_thirty_lines_serve_clients(example: Example) -> None:
    _, (babu, apfl, proto, _, average) = example("methods_in_thirty_lines")
    assert min(babu, apfl, proto) > average + 0.05


def test_drift_is_seen_and_taken_out(example: Example) -> None:
    _, (*_, fedavg, scaffold) = example("drift_pictured")
    assert fedavg > 0.3 and scaffold < 0.02


def test_clients_stay_closer_on_graphs_with_more_messages(example: Example) -> None:
    _, (_, ring, torus, exponential, everybody) = example("graphs_pictured")
    assert ring > 5 * torus > 5 * exponential > 0 and everybody == 0


def test_splits_differ_as_their_names_say(example: Example) -> None:
    _, (iid, dirichlet, _, pathological, _) = example("splits_pictured")
    assert iid >= 8 and dirichlet < 4 and pathological < 3


def test_personal_models_serve_those_that_one_model_serves_badly(example: Example) -> None:
    _, (personal, one, worst_personal, worst_one) = example("personal_models")
    assert personal > one + 0.05 and worst_personal > worst_one + 0.1


def test_the_median_stands_an_attack_that_the_mean_does_not(example: Example) -> None:
    _, (attacked, defended, peace) = example("attack_and_defence")
    assert defended >= attacked + 0.2 and defended > peace - 0.1


def test_a_privacy_budget_is_kept_and_costs_accuracy(example: Example) -> None:
    _, (strict, poor, loose, fair, best) = example("privacy_budget")
    assert 0.9 < strict <= 1 and 7 < loose <= 8
    assert best > 0.8 and poor < fair - 0.05 and fair <= best + 0.03


def test_a_killed_run_ends_with_the_same_bits(example: Example) -> None:
    sentence, (killed, rounds, weights, clients) = example("kill_and_resume")
    assert "and resumed: all of the" in sentence
    assert 6 <= killed < rounds == 20 and weights > 1000 and clients == 10


def test_a_claim_gets_a_verdict(example: Example) -> None:
    sentence, (seeds, mean, _, low, high) = example("sweep_with_a_claim")
    assert "The claim is reproduced" in sentence and seeds == 5
    assert 0 < low < mean < high and mean > 0.02


@pytest.mark.skipif(
    find_spec("optuna") is None, reason="optuna is not installed: pip install -e '.[test]'"
)
def test_a_search_prunes_and_keeps_its_trials(example: Example, tmp_path: Path) -> None:
    _, (pruned, trials, done, rounds, epochs, rate, accuracy) = example("search_with_optuna")
    assert (trials, rounds) == (12, 72) and pruned >= 2
    assert done < rounds
    assert epochs in (1, 2, 3) and 0.001 < rate < 1 and accuracy > 0.8
    with sqlite3.connect(tmp_path / "runs/examples/search_with_optuna/study.db") as database:
        kept = database.execute("SELECT state FROM trials").fetchall()
        (values,) = database.execute("SELECT COUNT(*) FROM trial_intermediate_values").fetchone()
    assert (len(kept), kept.count(("PRUNED",)), values) == (trials, pruned, done)


def test_a_landscape_is_flatter_where_it_was_sought(example: Example) -> None:
    _, (fedavg, fedsam) = example("landscape")
    assert 0 < fedsam < 0.9 * fedavg


def test_lora_trains_a_small_part(example: Example) -> None:
    _, (trained, whole, share, first, last) = example("text_with_lora")
    assert trained / whole == pytest.approx(share, abs=1e-3) and share < 0.3
    assert last < first - 0.5 and last < 3.5


def test_narrow_submodels_send_less_and_are_nearly_as_good(example: Example) -> None:
    _, numbers = example("submodels")
    accuracy, sent, best, most = numbers[-4:]
    assert sent < 0.6 * most and accuracy > 0.85 and accuracy > best - 0.05


def test_hospitals_gain_from_each_other(example: Example) -> None:
    _, (hospitals, together, alone) = example("clients_from_csv")
    assert hospitals == 8 and together > alone + 0.02


def test_an_own_cli_links_and_splits(example: Example) -> None:
    _, (classes, clients, accuracy) = example("own_cli")
    assert (classes, clients) == (7, 10) and accuracy > 0.8


def test_scaffold_by_hand_has_the_bits_of_the_callback(example: Example) -> None:
    sentence, (rounds, weights, accuracy) = example("scaffold_by_hand")
    assert "the same 2,410 numbers, bit for bit" in sentence
    assert (rounds, weights) == (5, 2410) and accuracy > 0.5
