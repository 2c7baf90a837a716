"""Pictures in folders by domain and class: Office-Caltech, PACS, Office-Home, DomainNet."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from fl_lightning.accepted import Above, Below, PositiveInt
from fl_lightning.datamodules.batches.sample_labels import MOST_CLASSES
from fl_lightning.datamodules.formats.digits5 import digits5
from fl_lightning.datamodules.formats.pictures import Mode, Pictures, check_normalised, size_of
from fl_lightning.datamodules.formats.tables import refuse_twice
from fl_lightning.datamodules.partitions.client_tests import OwnTests, stratified
from fl_lightning.datamodules.partitions.partition import ByGroup
from fl_lightning.datamodules.sources.file_data_module import (
    SHOWN,
    FileDataModule,
    Side,
    before_the_run,
)
from fl_lightning.errors import UserError, suggest
from fl_lightning.sampling import generator

ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".gif", ".tif", ".tiff", ".webp"}
# Pictures are decoded once and kept if they take at most this number of bytes.
IN_MEMORY = 2**30
DIGITS = list(map(str, range(10)))


Sample = tuple[Any, int]  # a file or pixels, and the class


@dataclass
class Domain:
    """One domain's samples."""

    name: str
    train: list[Sample]
    test: list[Sample] = field(default_factory=list)

    def keep(self, labels: Sequence[int]) -> None:
        """Leave out other labels, and number these by their places."""
        for samples in (self.train, self.test):
            samples[:] = [(x, labels.index(y)) for x, y in samples if y in labels]


class PictureSet(Dataset[Any]):
    """Pictures from files, or from pixels in memory, as ``(x, y)``."""

    def __init__(self, samples: Sequence[Sample], pictures: Pictures) -> None:
        self.x = [x for x, _ in samples]
        self.targets = np.array([y for _, y in samples], np.int64)
        self.pictures = pictures
        self.kept: list[Any] | None = None
        self._first: tuple[Any, Any] | None = None

    def __len__(self) -> int:
        return len(self.x)

    def pixels(self, i: int) -> NDArray[np.uint8]:
        """Return a picture as stored, decoded.

        Raises:
            UserError: its size differs from the first picture's.
        """
        one = self.x[i]
        found = self.pictures.read(one if isinstance(one, Path) else Image.fromarray(one))
        if self._first is None:
            self._first = (one, found.shape)
        if found.shape != self._first[1]:
            first, shape = self._first
            raise UserError(
                f"The picture {str(one)!r} has the shape {found.shape}, and {str(first)!r} has "
                f"{shape}: give data.image_size, to which all are resized."
            )
        return np.asarray(found, np.uint8)

    def __getitem__(self, i: int) -> tuple[Any, int]:
        pixels = self.pixels(i) if self.kept is None else self.kept[i]
        return self.pictures.tensor(pixels), int(self.targets[i])

    def keep(self) -> None:
        """Decode all pictures now."""
        self.kept = [self.pixels(i) for i in range(len(self))]


class FromFolders(FileDataModule):
    """Federated data from folders of pictures: each client is a domain, or several clients share
    one.

    Args:
        path: the folder.
        layout: ``"folders"``: ``path/<domain>/<class>/<file>``; ``"lists"``:
            ``path/splits/<domain>_train.txt`` and ``_test.txt`` with lines ``relative/file label``;
            ``"digits5"``: the five .mat files; ``"auto"``: recognised from the files.
        domains: the domains in the order of their numbers; None: all, ascending. Other domains are
            left out.
        classes: likewise; with ``lists`` the names of the labels 0, 1, …
        image_size: pixels, or ``[height, width]``, to which pictures are resized; None: pictures
            keep their size, which has to be equal.
        mode: PIL's mode, to which pictures are converted: ``"RGB"``, ``"L"`` (grey), ``"1"`` (0 and
            1), …
        mean, std: x is (pixel / 255 − mean) / std, by channel.
        clients_per_domain: number of clients among which a domain's training samples are divided.
        test: None: the test lists; or a share of each domain, of each class alike, the same for
            every seed.
        leave_out: domains that no client trains on; all their samples are the global test set.
        missing: ``"refuse"`` or ``"allow"`` a class that one domain lacks.
        in_memory: keep decoded pictures; None: if they take at most 1 GiB.
        check: decode every picture before training.
        limit: ``[training, test]``: use only so many of the first samples of each domain.

    ``client_domains``: the domain of each client; ``domains`` lists them.

    Raises:
        UserError: it names the file of a picture that cannot be decoded, or of pictures of two
            sizes without ``image_size``; or the domain that lacks a class.
    """

    client_domains: Sequence[str] = ()

    def __init__(
        self,
        path: str | Path,
        layout: Literal["auto", "folders", "lists", "digits5"] = "auto",
        domains: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        image_size: int | list[int] | None = None,
        mode: Mode = "RGB",
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        clients_per_domain: PositiveInt = 1,
        test: Annotated[float, Above(0), Below(1)] | None = None,
        leave_out: Sequence[str] = (),
        missing: Literal["refuse", "allow"] = "refuse",
        in_memory: bool | None = None,
        check: bool = False,
        limit: list[PositiveInt] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(tests="common", **arguments)
        check_normalised(mean, std)
        if limit is not None and len(limit) != 2:
            raise UserError(
                f"data.limit is {list(limit)}: give two numbers, of training and of test samples "
                "of each domain, such as [25000, 9000]."
            )
        self.path = Path(path).expanduser()
        self.layout = layout
        self.domains = None if domains is None else list(domains)
        self.classes = None if classes is None else list(classes)
        self.pictures = Pictures(size_of(image_size), mode, tuple(mean), tuple(std))
        self.mean = self.pictures.mean
        self.std = self.pictures.std
        self.clients_per_domain = clients_per_domain
        self.test = test
        self.leave_out = list(leave_out)
        self.missing = missing
        self.in_memory = in_memory
        self.check = check
        self.limit = limit

    @classmethod
    def shape_of_samples(cls, **arguments: Any) -> tuple[int, ...] | None:
        """Return ``(channels, height, width)``: the size to which pictures are resized, else
        that of the first one.
        """
        size = size_of(arguments.get("image_size"))
        # An option is read as a number before the parser knows its type.
        mode = str(arguments.get("mode", "RGB"))
        channels = Image.getmodebands(mode) if mode in get_args(Mode) else None
        path = Path(str(arguments.get("path", ""))).expanduser()
        first = next((file for file in path.glob("*/*/*") if file.suffix.lower() in ENDINGS), None)
        if size is None and first is not None:
            pixels = Pictures(mode="L").read(first)
            size = (pixels.shape[0], pixels.shape[1])
        return None if size is None or channels is None else (channels, *size)

    @classmethod
    def classes_of_samples(cls, **arguments: Any) -> int | None:
        """Return the number of classes: of the folders, or of the labels in the lists."""
        path = Path(str(arguments.get("path", ""))).expanduser()
        if not path.is_dir():
            return None
        layout = arguments.get("layout") or "auto"
        layout = layout_of(path) if layout == "auto" else layout
        if layout == "digits5":
            return len(DIGITS)
        if layout == "lists":
            try:
                data = before_the_run(cls, arguments)
                data._lists()
            except Exception:  # the run reports what is wrong
                return None
            return len(data.class_names) or None
        names = set().union(*(folders_of(path / domain) for domain in folders_of(path)))
        return len(names) or None

    def read(self) -> tuple[Side, Side | None, Side | None]:
        if not self.path.is_dir():
            raise UserError(
                f"data.path is {str(self.path)!r}, which is not a folder (the present folder is "
                f"{str(Path.cwd())!r})." + suggest(str(self.path), os.listdir())
            )
        layout: str = self.layout
        if layout == "auto":
            layout = layout_of(self.path)
            self.tell(f"{str(self.path)!r} is read as layout={layout}")
        if layout == "digits5":
            found = digits5(self.path, self.domains)
            domains = [
                Domain(name, list(zip(x, y, strict=True)), list(zip(test_x, test_y, strict=True)))
                for name, (x, y, test_x, test_y) in found.items()
            ]
            self.class_names = self._chosen(DIGITS, self.classes, "classes")
            for domain in domains:
                domain.keep([DIGITS.index(name) for name in self.class_names])
        elif layout == "lists":
            domains = self._lists()
        else:
            domains = self._folders()
        for domain in domains:
            self._limit(domain)
        self._check(domains)
        if self.test is not None:
            for number, domain in enumerate(domains):
                self._hold_out(number, domain)
        return self._sides(domains)

    # ---- layouts

    def _chosen(self, there: Sequence[str], given: list[str] | None, option: str) -> list[str]:
        """Return the names that count, in their order."""
        refuse_twice(f"data.{option}", given or ())
        for name in given or ():
            if name not in there:
                raise UserError(
                    f"data.{option} has {name!r}, and {str(self.path)!r} has "
                    f"{', '.join(there)[:300]}.{suggest(name, list(there))}"
                )
        return sorted(there) if given is None else given

    def _folders(self) -> list[Domain]:
        domains = self._chosen(folders_of(self.path), self.domains, "domains")
        if not domains:
            raise UserError(
                f"data.path is {str(self.path)!r}, which has no folders: a folder for each domain "
                "is expected, in each a folder for each class."
            )
        of = {domain: folders_of(self.path / domain) for domain in domains}
        every = sorted(set().union(*of.values()))
        self.class_names = self._chosen(every, self.classes, "classes")
        if not self.class_names:
            raise UserError(
                f"data.path is {str(self.path)!r}, whose folders {', '.join(domains)[:100]} have "
                "no folders of classes: path/<domain>/<class>/<file> is expected."
            )
        made = []
        for domain in domains:
            samples: list[Sample] = []
            for label, name in enumerate(self.class_names):
                samples += [(file, label) for file in pictures_of(self.path / domain / name)]
            samples.sort(key=lambda sample: sample[0].as_posix())
            made.append(Domain(domain, samples))
        return made

    def _lists(self) -> list[Domain]:
        folder = self.path / "splits" if (self.path / "splits").is_dir() else self.path
        if not any(folder.glob("*_train.txt")):
            raise UserError(
                f"data.layout is 'lists', and {str(folder)!r} has no lists <domain>_train.txt: "
                "give the folder that holds them, or layout=folders for pictures in "
                "path/<domain>/<class>."
            )
        there = [file.name.removesuffix("_train.txt") for file in folder.glob("*_train.txt")]
        made = []
        for domain in self._chosen(there, self.domains, "domains"):
            one = Domain(domain, listed(self.path, folder / f"{domain}_train.txt"))
            if (folder / f"{domain}_test.txt").is_file():
                one.test = listed(self.path, folder / f"{domain}_test.txt")
            if both := len({file for file, _ in one.train} & {file for file, _ in one.test}):
                self.tell(
                    f"{both} pictures of the domain {domain!r} are in its training list and in its "
                    "test list: its test accuracy is too high"
                )
            made.append(one)
        check_labels_agree(made)
        labels = sorted(set().union(*map(labels_of, made)))
        if self.classes is not None and labels and labels[-1] >= len(self.classes):
            raise UserError(
                f"data.classes has {len(self.classes)} names, and the lists have the label "
                f"{labels[-1]}: give a name for each label from 0."
            )
        names: dict[int, str] = {}
        for one in made:
            for file, label in one.train:
                names.setdefault(label, file.parent.name)
        # A label without a sample has no folder that could name it.
        whole = range(labels[-1] + 1 if labels else 0)
        self.class_names = self.classes or [names.get(label, str(label)) for label in whole]
        return made

    # ---- from domains to clients

    def _check(self, domains: list[Domain]) -> None:
        """Refuse a class that a domain lacks, and names in leave_out that are not domains."""
        self._chosen([domain.name for domain in domains], self.leave_out, "leave_out")
        every = set(range(len(self.class_names)))
        there = set().union(*map(labels_of, domains))
        for domain in domains:
            lacks = sorted(every - labels_of(domain))
            if not lacks:
                continue
            names = ", ".join(str(self.class_names[label]) for label in lacks[:SHOWN])
            text = f"the domain {domain.name!r} has no pictures of {names}"
            if self.missing == "refuse":
                others = "other domains have" if there & set(lacks) else "no domain has"
                raise UserError(
                    f"data.path={str(self.path)!r}: {text}, which {others}. Give "
                    "data.missing=allow, name the classes that all have by data.classes, or check "
                    "the folders' names."
                )
            self.tell(text)

    def _limit(self, domain: Domain) -> None:
        if self.limit is not None:
            (training, tests) = self.limit
            domain.train = domain.train[:training]
            domain.test = domain.test[:tests]

    def _hold_out(self, number: int, domain: Domain) -> None:
        """Test on a share of a domain's samples, of each class alike."""
        n = len(domain.train)
        h = int(Decimal(str(self.test)) * n + Decimal("0.5"))
        labels = np.array([y for _, y in domain.train], np.int64)
        order = generator(0, "files to test on", number).permutation(n)
        if not h:
            self.tell(f"data.test={self.test:g} holds out none of the {n} files of {domain.name!r}")
        held = set(stratified(order, labels[order], h).tolist()) if h else set()
        domain.test += [domain.train[i] for i in sorted(held)]
        domain.train = [domain.train[i] for i in range(n) if i not in held]

    def _sides(self, domains: list[Domain]) -> tuple[Side, Side | None, Side | None]:
        training = [(i, d) for i, d in enumerate(domains) if d.name not in self.leave_out]
        if not training:
            raise UserError("data.leave_out has all domains: leave one to train on.")
        k = self.clients_per_domain
        names: list[str] = []
        groups: list[NDArray[np.int64]] = []
        for number, domain in training:
            groups.append(self._dealt(number, domain) + len(names))
            names += [domain.name] if k == 1 else [f"{domain.name}/{j}" for j in range(k)]
        self.client_domains = [name.rpartition("/")[0] if k > 1 else name for name in names]
        self._own = {domain.name: domain.test for _, domain in training if domain.test}
        samples = list(chain.from_iterable(domain.train for _, domain in training))
        return Side(names, np.concatenate(groups), self._set(samples)), self._global(domains), None

    def _global(self, domains: list[Domain]) -> Side | None:
        """Set the global test set: from all domains, or from those that are left out."""
        left = [domain for domain in domains if domain.name in self.leave_out]
        parts = [one.train + one.test for one in left] or [one.test for one in domains]
        samples = list(chain.from_iterable(parts))
        if not samples:
            return None
        groups = np.repeat(np.arange(len(parts)), list(map(len, parts)))
        return Side([domain.name for domain in left or domains], groups, self._set(samples))

    def _dealt(self, number: int, domain: Domain) -> NDArray[np.int64]:
        """Return the client of each of a domain's training samples, from 0."""
        n = len(domain.train)
        clients = np.zeros(n, np.int64)
        if self.clients_per_domain > 1:
            order = generator(self.run_seed, "domain", number).permutation(n)
            for k, part in enumerate(np.array_split(order, self.clients_per_domain)):
                clients[part] = k
        return clients

    def _set(self, samples: list[Sample]) -> PictureSet:
        made = PictureSet(samples, self.pictures)
        self._files += [file for file in made.x if isinstance(file, Path)]
        keep = self.in_memory
        if keep is None and len(made):
            keep = made.pixels(0).nbytes * len(made) <= IN_MEMORY
        if keep or self.check:
            made.keep()
        if not keep:
            made.kept = None
        return made

    def setup(self, stage: str | None = None) -> None:
        if self.clients_per_domain > 1 and self._split_seed not in (None, self.run_seed):
            self.train_set = None  # The seed decides which of a domain's clients has which samples.
        super().setup(stage)

    def load(self) -> None:
        super().load()
        if not isinstance(self.partition, ByGroup):
            self.client_domains = ()
            return
        if not self._own:
            return
        assert self.train_set is not None
        tests = list(chain.from_iterable(self._own.values()))
        # Unless domains are left out, these samples are the global test set.
        samples = self._samples(self._set(tests)) if self.leave_out else self.test_set
        assert samples is not None
        ends = np.cumsum(list(map(len, self._own.values())))
        places = dict(zip(self._own, np.split(np.arange(len(tests)), ends[:-1]), strict=True))
        own: list[Any] = [places.get(domain, []) for domain in self._domains_of_all()]
        self.own_tests = OwnTests(samples, own, len(self.train_set))

    def _domains_of_all(self) -> list[str]:
        """Return the domain of each client that has training samples."""
        many = self.clients_per_domain > 1
        names = [name.rpartition("/")[0] if many else name for name in self.client_names]
        self.client_domains = names
        return names


def layout_of(path: Path) -> str:
    """Return the layout of a folder, recognised from its files."""
    if (path / "mnist_data.mat").is_file():
        return "digits5"
    if list(path.glob("splits/*_train.txt")) or list(path.glob("*_train.txt")):
        return "lists"
    return "folders"


def folders_of(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir() if one.is_dir() and one.name[0] != ".")


def labels_of(domain: Domain) -> set[int]:
    return {label for _, label in domain.train + domain.test}


def pictures_of(folder: Path) -> list[Path]:
    # A link to a picture that is not there is refused when it is read.
    files = folder.iterdir() if folder.is_dir() else []
    files = [one for one in files if not one.is_dir() and one.name[0] != "."]
    return [one for one in files if one.suffix.lower() in ENDINGS]


def listed(path: Path, file: Path) -> list[Sample]:
    """Return the samples of a list.

    Raises:
        UserError: a line has no label, or names a file that does not exist; the error has the line.
    """
    samples: list[Sample] = []
    try:
        text = file.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"The list {str(file)!r} is not in UTF-8, which it has to be ({error.reason} at byte "
            f"{error.start}): save it as UTF-8."
        ) from None
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        name, _, label = line.rstrip().rpartition(" ")
        where = path / name
        if not label.isdecimal() or not name or not where.resolve().is_relative_to(path.resolve()):
            raise UserError(
                f"The list {str(file)!r} has {line[:80]!r} in line {number}: 'relative/file label' "
                "is expected, with a whole number."
            )
        # Python refuses to make a number of thousands of digits.
        if len(label) > len(str(MOST_CLASSES)) or int(label) >= MOST_CLASSES:
            raise UserError(
                f"The list {str(file)!r} has the label {label[:40]} in line {number}, and classes "
                "are numbered from 0: number them anew."
            )
        if not where.is_file():
            raise UserError(
                f"The list {str(file)!r} names {name!r} in line {number}, which is not in "
                f"{str(path)!r}: give the folder to which the names are relative as data.path."
            )
        samples.append((where, int(label)))
    return samples


def check_labels_agree(domains: Sequence[Domain]) -> None:
    """Refuse lists in which a folder of one name has different labels.

    Lists whose folders are not classes say nothing: there a folder has several labels, or a label
    several folders.

    Raises:
        UserError: with the folder, both domains and both labels.
    """
    first: dict[str, tuple[int, str]] = {}
    for domain in domains:
        for samples in (domain.train, domain.test):
            pairs = {(file.parent.name, label) for file, label in samples}
            if not len(pairs) == len({name for name, _ in pairs}) == len({y for _, y in pairs}):
                continue
            for name, label in sorted(pairs):
                (other, where) = first.setdefault(name, (label, domain.name))
                if other != label:
                    raise UserError(
                        f"The lists of {domain.name!r} give the folder {name!r} the label {label}, "
                        f"and those of {where!r} the label {other}. One class needs one label in "
                        "all domains: number the classes alike in every list."
                    )
