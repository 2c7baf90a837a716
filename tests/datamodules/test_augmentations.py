"""Augmentations by name: what they make of pictures and labels, and that bits do not depend on who
makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.transforms import InterpolationMode
from torchvision.transforms.autoaugment import RandAugment, _apply_op

from fl_lightning import FederatedModule, UserError
from fl_lightning.datamodules import Digits, FromFolders, InMemoryDataModule
from fl_lightning.datamodules.batches.rand_augment import all_operations
from fl_lightning.models import MLP, ImageClassifier
from tests.helpers.learners import trainer
from tests.helpers.zygote import Cli

ALL = ["crop", {"flip": {"probability": 0.5}}, "randaugment", "mixup", "cutmix"]


def data(x: Tensor, y: Tensor, augment: Any, **arguments: Any) -> InMemoryDataModule:
    return InMemoryDataModule((x, y), num_clients=1, augment=augment, **arguments)


def batch_of(made: InMemoryDataModule, round: int = 0) -> tuple[Tensor, Tensor]:
    (x, y) = next(iter(made.client_batches(0, round, 1)))
    return x, y


def classes_as_levels(n: int = 12) -> tuple[Tensor, Tensor]:
    """Pictures whose channel c is 1 where the class is c: means of a channel are shares."""
    y = torch.arange(n) % 3
    return nn.functional.one_hot(y, 3).float()[:, :, None, None].expand(n, 3, 6, 8), y


@pytest.mark.parametrize("magnitude", [0, 9, 17, 30])
def test_operations_are_torchvisions(magnitude: int) -> None:
    picture = torch.randint(0, 256, (3, 20, 23), generator=torch.Generator().manual_seed(1))
    picture = picture.to(torch.uint8)
    table = RandAugment()._augmentation_space(31, (20, 23))
    for (name, (levels, signed)), own in zip(table.items(), all_operations(), strict=True):
        level = float(levels[magnitude]) if levels.ndim else 0.0
        for sign in (1, -1) if signed else (1,):
            theirs = _apply_op(picture, name, sign * level, InterpolationMode.NEAREST, None)
            ours = own(picture, sign * magnitude / 30)
            # Its levels are single precision, which moves some pixels by one.
            assert (ours.int() - theirs.int()).abs().max() <= 1, (name, sign)


def test_mixed_labels_are_the_shares_of_the_pictures() -> None:
    x, y = classes_as_levels()
    seen = set()
    for augment in (["mixup"], [{"cutmix": {"alpha": 1.0}}], ["mixup", "cutmix"]):
        for round in range(6):
            mixed, shares = batch_of(data(x, y, augment), round)
            torch.testing.assert_close(mixed.mean((2, 3)), shares)
            torch.testing.assert_close(shares.sum(1), torch.ones(12))
            seen.add("cutmix" if bool(((mixed == 0) | (mixed == 1)).all()) else "mixup")
    assert seen == {"mixup", "cutmix"}


def test_crops_are_windows_in_a_black_frame_of_normalised_pictures() -> None:
    made = Digits(num_clients=1, augment=[{"crop": {"padding": 2}}], batch_size=40)
    plain = Digits(num_clients=1, batch_size=40)
    ((x, _), (whole, _)) = (next(iter(one.client_batches(0, 3, 1))) for one in (made, plain))
    framed = nn.functional.pad(whole, (2, 2, 2, 2), value=-0.3053 / 0.3760)
    places = set()
    for one, own in zip(x, framed, strict=True):
        fits = [(a, b) for a in range(5) for b in range(5)]
        fits = [at for at in fits if torch.allclose(own[:, at[0] :][:, :8, at[1] :][:, :, :8], one)]
        assert fits
        places.add(fits[0])
    assert len(places) > 10


def test_randaugment_at_magnitude_0_leaves_most_pictures_as_they_are(tmp_path: Path) -> None:
    from PIL import Image

    for name in ("cat", "dog"):
        (tmp_path / "art" / name).mkdir(parents=True)
        for i in range(6):
            Image.new("RGB", (9, 9), (30 * i, 7, 250)).save(tmp_path / "art" / name / f"{i}.png")
    options: dict[str, Any] = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.2], "batch_size": 12}
    augment = [{"randaugment": {"operations": 1, "magnitude": 0}}]
    made = FromFolders(tmp_path, augment=augment, **options)
    plain = FromFolders(tmp_path, **options)
    ((x, _), (whole, _)) = (next(iter(one.client_batches(0, 0, 1))) for one in (made, plain))
    same = [torch.equal(a, b) for a, b in zip(x, whole, strict=True)]
    assert x.shape == whole.shape and sum(same) >= 6


def fitted(folder: Path | None, rounds: int, **arguments: Any) -> FederatedModule:
    torch.manual_seed(0)
    learner = ImageClassifier(MLP([64, 8, 10]), num_classes=10, lr=0.1)
    module = FederatedModule(learner, participation="all", local_epochs=2, seed=1, **arguments)
    digits = Digits(num_clients=4, samples=120, batch_size=8, augment=ALL)
    given = {
        "callbacks": [],
        "default_root_dir": folder,
        "enable_checkpointing": folder is not None,
    }
    one = trainer(rounds, **given)
    path = folder / "last.ckpt" if folder else None
    one.fit(module, digits, ckpt_path=path if path and path.is_file() else None)
    if path:
        one.save_checkpoint(path)
    return module


def test_engines_threads_processes_and_a_resume_have_the_same_bits(tmp_path: Path) -> None:
    expected = fitted(None, 4).global_vector
    for arguments in ({"engine": "sequential"}, {"engine": "concurrent", "workers": 3}):
        assert torch.equal(fitted(None, 4, **arguments).global_vector, expected)
    fitted(tmp_path, 2)
    assert torch.equal(fitted(tmp_path, 4).global_vector, expected)


def test_rounds_clients_and_steps_draw_differently() -> None:
    x = torch.rand(8, 3, 8, 8)
    y = torch.zeros(8, dtype=torch.int64)
    made = InMemoryDataModule(
        (x, y), clients=[list(range(8)), list(range(8))], augment=["crop"], batch_size=None
    )
    batches = []
    for client, round in ((0, 0), (1, 0), (0, 1)):
        batches += [one.sort(0).values for one, _ in made.client_batches(client, round, 2)]
    assert len({one.numpy().tobytes() for one in batches}) == 6


@pytest.mark.parametrize(
    ("augment", "what"),
    [
        (
            ["crops"],
            r"'crops', which is not an augmentation; there are crop, .*Did you mean 'crop'",
        ),
        ([{"crop": {"pad": 2}}], "crop has no argument 'pad'; it has padding, probability"),
        (
            [{"flip": {"probability": 2}}],
            "flip's probability=2 is not accepted; it has to be a number from 0 up to 1",
        ),
        (
            [{"randaugment": {"magnitude": 1.5}}],
            "magnitude=1.5 is .* an integer from 0 up to 30",
        ),
        (
            [{"mixup": {"alpha": 0}}],
            "mixup's alpha=0 is not accepted; it has to be a number above 0",
        ),
        ([{"crop": {}, "flip": {}}], "give one name per item"),
    ],
)
def test_what_is_unknown_is_refused(augment: Any, what: str) -> None:
    with pytest.raises(UserError, match=what):
        Digits(augment=augment)


def test_what_is_no_picture_is_refused() -> None:
    y = torch.arange(4) % 2
    for x, augment, what in (
        (torch.rand(4, 5), "crop", r"x is torch.float32 of shape \(4, 5\)"),
        (3 * torch.rand(4, 3, 6, 6) + 1, "randaugment", "changes pixels from 0 to 1, and x are"),
        (torch.rand(4, 2, 6, 6), "randaugment", "takes pictures of 1 or 3 channels, and x has 2"),
    ):
        with pytest.raises(UserError, match=what):
            batch_of(data(x, y, augment))
    with pytest.raises(UserError, match="mix classes, but y are not class indices"):
        batch_of(data(torch.rand(4, 3, 6, 6), torch.rand(4), "mixup"))


def test_it_is_given_in_yaml_and_methods_that_need_classes_refuse_shares(cli: Cli) -> None:
    fit = ("fit", "-c", "base", "-c", "trainer/cpu", "--trainer.max_epochs", 1)
    plain = ("--data.samples", 100, "--data.augment")
    run = cli(*fit, *plain, "[crop, {randaugment: {magnitude: 5}}, mixup]")
    assert run.returncode == 0, run.stderr
    refused = cli(*fit, "-c", "method/fedlc", *plain, "[mixup]")
    assert refused.returncode == 2 and "soft labels are not accepted" in refused.stderr
