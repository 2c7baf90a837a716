"""Pictures in folders by domain and class, as PACS, or by split and class, as Tiny-ImageNet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import Dataset

from fl_lightning.datamodules.formats.damaged import refused
from fl_lightning.datamodules.formats.pictures import Mode, Pictures, Size
from fl_lightning.datamodules.formats.tables import refuse_twice
from fl_lightning.datamodules.partitions.client_tests import OwnTests, stratified
from fl_lightning.datamodules.partitions.partition import ByGroup
from fl_lightning.datamodules.sources.file_data_module import SHOWN, FileDataModule, Side
from fl_lightning.errors import UserError, suggest
from fl_lightning.introspection.accepted import Above, Below, PositiveFloat, PositiveInt
from fl_lightning.sampling import generator

Sample = tuple[Any, int]  # a file or pixels, and the class
SIDES = ("train", "test")
# The domains of Digits-5.
DIGITS = ("mnist", "mnistm", "svhn", "syn", "usps")


def arrays(path: Path, *names: str) -> list[NDArray[Any]]:
    """Return arrays of a .mat file.

    Raises:
        UserError: the file does not exist, is damaged, or lacks an array.
    """
    from scipy.io import loadmat

    remedy = "Copy it again, or name the domains that are there by data.domains."
    with refused(f"The file {str(path)!r} of Digits-5 cannot be read", remedy):
        content = loadmat(str(path), variable_names=names)
        return [content[name] for name in names]


def digits(path: Path, domain: str) -> list[list[Sample]]:
    """Return the training and the test samples of a domain of Digits-5."""
    parts: Any
    if domain == "usps":
        (parts,) = arrays(path / "usps_28x28.mat", "dataset")
        parts = [(np.floor(x[:, 0] * 255 + 0.5), y) for x, y in parts]
    elif domain in ("svhn", "syn"):
        name = "svhn" if domain == "svhn" else "synth"
        parts = [arrays(path / f"{name}_{side}_32x32.mat", "X", "y") for side in SIDES]
        parts = [(x.transpose(3, 0, 1, 2), y) for x, y in parts]
    elif domain == "mnistm":
        file = path / "mnistm_with_label.mat"
        parts = [arrays(file, side, f"label_{side}") for side in SIDES]
    else:
        file = path / "mnist_data.mat"
        parts = [arrays(file, f"{side}_32", f"label_{side}") for side in SIDES]
    return [labelled(x, y) for x, y in parts]


def labelled(x: NDArray[Any], y: NDArray[Any]) -> list[Sample]:
    """Return pictures ``(N, H, W)`` or ``(N, H, W, 1 or 3)`` in colour, and their classes.

    Classes are one-hot, or numbers of which 10 is the digit 0.
    """
    x = x[..., None] if x.ndim == 3 else x
    coloured = np.broadcast_to(x, (*x.shape[:3], 3)).astype(np.uint8)
    classes = y.argmax(axis=1) if y.shape[1:] == (10,) else y.ravel().astype(np.int64) % 10
    return list(zip(coloured, classes.tolist(), strict=True))


ENDINGS = {".jpg", ".jpeg", ".png", ".bmp", ".ppm", ".gif", ".tif", ".tiff", ".webp"}
# Pictures are decoded once and kept if they take at most this number of bytes.
IN_MEMORY = 2**30

# Names of the folders of pictures that no client trains on.
HELD = ("val", "validation", "test")


@dataclass
class Domain:
    """One domain's samples."""

    name: str
    train: list[Sample]
    test: list[Sample] = field(default_factory=list)
    val: list[Sample] = field(default_factory=list)

    @property
    def labels(self) -> set[int]:
        return {label for _, label in self.train + self.test}


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
        if isinstance(one, Path):
            found = self.pictures.read(one)
        else:
            found = self.pictures.array(Image.fromarray(one))
        if self._first is None:
            self._first = (one, found.shape)
        if found.shape != self._first[1]:
            first, shape = self._first
            raise UserError(
                f"The picture {str(one)!r} has the shape {found.shape}, and {str(first)!r} has "
                f"{shape}: give data.image_size, to which all are resized."
            )
        return found

    def decode(self, keep: bool | None) -> None:
        """Decode all pictures and keep them; None: if they take at most ``IN_MEMORY``."""
        if keep is None and len(self):
            keep = self.pixels(0).nbytes * len(self) <= IN_MEMORY
        if keep:
            self.kept = [self.pixels(i) for i in range(len(self))]

    def __getitem__(self, i: int) -> tuple[Any, int]:
        pixels = self.pixels(i) if self.kept is None else self.kept[i]
        return self.pictures.tensor(pixels), int(self.targets[i])


class FromFolders(FileDataModule):
    """Federated data from folders of pictures: a client is a domain, or a part of one.

    Args:
        path: the folder.
        layout: ``"folders"``: ``path/<domain>/<class>/<file>``; ``"lists"``:
            ``path/splits/<domain>_train.txt`` and ``_test.txt`` with lines ``relative/file label``;
            ``"digits5"``: the five .mat files; ``"splits"``: ``path/train/<class>/<file>`` with
            ``val`` or ``test`` beside it, for a ``partition``, and also Tiny-ImageNet's
            ``path/train/<class>/images/<file>`` with ``val/val_annotations.txt``; ``"auto"``:
            recognised from the files. With ``splits`` the validation set is the test set if
            ``test`` has no classes.
        domains: the domains in the order of their numbers; None: all, ascending. Other domains are
            left out.
        classes: likewise; with ``lists`` the names of the labels 0, 1, …; not with ``digits5``.
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
        layout: Literal["auto", "folders", "lists", "digits5", "splits"] = "auto",
        domains: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        image_size: Size = None,
        mode: Mode = "RGB",
        mean: Sequence[float] = (),
        std: Sequence[PositiveFloat] = (),
        clients_per_domain: PositiveInt = 1,
        test: Annotated[float, Above(0), Below(1)] | None = None,
        leave_out: Sequence[str] = (),
        missing: Literal["refuse", "allow"] = "refuse",
        in_memory: bool | None = None,
        limit: tuple[PositiveInt, PositiveInt] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(tests="common", **arguments)
        self.path = Path(path).expanduser()
        self.layout = layout
        self.domains = None if domains is None else list(domains)
        self.classes = None if classes is None else list(classes)
        self.pictures = Pictures.of(image_size, mode, mean, std)
        self.mean = self.pictures.mean
        self.std = self.pictures.std
        self.clients_per_domain = clients_per_domain
        self.test = test
        self.leave_out = list(leave_out)
        self.missing = missing
        self.in_memory = in_memory
        self.limit = limit
        self._sets: list[PictureSet] = []

    @classmethod
    def shape_of_samples(cls, **arguments: Any) -> tuple[int, ...] | None:
        size = Pictures.of(arguments.get("image_size"), None, (), ()).size
        mode = str(arguments.get("mode", "RGB"))
        if size is None or mode not in get_args(Mode):
            return super().shape_of_samples(**arguments)
        return (Image.getmodebands(mode), *size)

    @classmethod
    def classes_of_samples(cls, **arguments: Any) -> int | None:
        path = Path(str(arguments.get("path")), "mnist_data.mat").expanduser()
        if arguments.get("layout", "auto") in ("auto", "digits5") and path.is_file():
            return 10  # the files of Digits-5 take long to read
        return super().classes_of_samples(**arguments)

    def read(self) -> tuple[Side, Side | None, Side | None]:
        if not self.path.is_dir():
            raise UserError(
                f"data.path is {str(self.path)!r}, which is not a folder (the present folder is "
                f"{str(Path.cwd())!r})."
            )
        self._read_as = self._layout()
        readers = {"digits5": self._digits5, "lists": self._lists, "splits": self._splits}
        domains = readers.get(self._read_as, self._folders)()
        if self.limit is not None:
            for domain in domains:
                domain.train = domain.train[: self.limit[0]]
                domain.test = domain.test[: self.limit[1]]
        self._check(domains)
        if self.test is not None:
            for number, domain in enumerate(domains):
                self._hold_out(number, domain)
        return self._sides(domains)

    # ---- layouts

    def _layout(self) -> str:
        if self.layout != "auto":
            return self.layout
        found = "folders"
        if (self.path / "mnist_data.mat").is_file():
            found = "digits5"
        elif [*self.path.glob("splits/*_train.txt"), *self.path.glob("*_train.txt")]:
            found = "lists"
        elif (self.path / "train").is_dir() and any((self.path / name).is_dir() for name in HELD):
            found = "splits"
        self.tell(f"{str(self.path)!r} is read as layout={found}")
        return found

    def _chosen(self, there: Sequence[str], given: list[str] | None, option: str) -> list[str]:
        refuse_twice(f"data.{option}", given or ())
        for name in given or ():
            if name not in there:
                raise UserError(
                    f"data.{option} has {name!r}, and {str(self.path)!r} has "
                    f"{', '.join(there)[:300]}.{suggest(name, list(there))}"
                )
        return sorted(there) if given is None else given

    def _digits5(self) -> list[Domain]:
        self.class_names = list(map(str, range(10)))
        names = self._chosen(DIGITS, self.domains, "domains")
        return [Domain(name, *digits(self.path, name)) for name in names]

    def _folders(self) -> list[Domain]:
        domains = self._chosen(folders_of(self.path), self.domains, "domains")
        every = set().union(*(folders_of(self.path / domain) for domain in domains))
        self.class_names = self._chosen(sorted(every), self.classes, "classes")
        if len(self.class_names) < 2:
            raise UserError(
                f"data.path is {str(self.path)!r}, whose folders {', '.join(domains)[:100]} all "
                f"together have the classes [{', '.join(self.class_names)}]: two or more folders "
                "of classes are expected, as in path/<domain>/<class>/<file>. For Tiny-ImageNet "
                "give the folder that has train and val."
            )
        return [Domain(domain, self._by_class(self.path / domain)) for domain in domains]

    def _by_class(self, folder: Path) -> list[Sample]:
        samples: list[Sample] = []
        for label, name in enumerate(self.class_names):
            within = folder / name / "images"
            files = pictures_of(within if within.is_dir() else folder / name)
            samples += [(file, label) for file in files]
        return sorted(samples, key=lambda sample: sample[0].as_posix())

    def _splits(self) -> list[Domain]:
        self.class_names = self._chosen(folders_of(self.path / "train"), self.classes, "classes")
        parts = {name: self._held(self.path / name) for name in HELD}
        val = parts["val"] or parts["validation"]
        one = Domain(self.path.name, self._by_class(self.path / "train"))
        one.test, one.val = (parts["test"], val) if parts["test"] else (val, [])
        return [one]

    def _held(self, folder: Path) -> list[Sample]:
        notes = folder / "val_annotations.txt"
        if not notes.is_file():
            return self._by_class(folder)
        places = {name: label for label, name in enumerate(self.class_names)}
        lines = [line.split("\t") for line in notes.read_text("utf-8").splitlines()]
        return [
            (folder / "images" / line[0], places[line[1]]) for line in lines if line[1] in places
        ]

    def _lists(self) -> list[Domain]:
        folder = self.path / "splits" if (self.path / "splits").is_dir() else self.path
        there = [file.name.removesuffix("_train.txt") for file in folder.glob("*_train.txt")]
        if not there:
            raise UserError(
                f"data.layout is 'lists', and {str(folder)!r} has no lists <domain>_train.txt: "
                "give the folder that holds them, or layout=folders for pictures in "
                "path/<domain>/<class>."
            )
        made = []
        for domain in self._chosen(there, self.domains, "domains"):
            one = Domain(domain, listed(self.path, folder / f"{domain}_train.txt"))
            if (folder / f"{domain}_test.txt").is_file():
                one.test = listed(self.path, folder / f"{domain}_test.txt")
            made.append(one)
        names: dict[int, str] = {}
        for file, label in chain.from_iterable(one.train for one in made):
            names.setdefault(label, file.parent.name)
        last = max(set().union(*(one.labels for one in made)), default=-1)
        if self.classes is not None and last >= len(self.classes):
            raise UserError(
                f"data.classes has {len(self.classes)} names, and the lists have the label "
                f"{last}: give a name for each label from 0."
            )
        # A label without a sample has no folder that could name it.
        self.class_names = self.classes or [names.get(i, str(i)) for i in range(last + 1)]
        return made

    # ---- from domains to clients

    def _check(self, domains: list[Domain]) -> None:
        """Refuse a class that a domain lacks, and names in leave_out that are not domains."""
        self._chosen([domain.name for domain in domains], self.leave_out, "leave_out")
        for domain in domains:
            lacks = sorted(set(range(len(self.class_names))) - domain.labels)
            if not lacks:
                continue
            names = ", ".join(str(self.class_names[label]) for label in lacks[:SHOWN])
            text = f"the domain {domain.name!r} has no pictures of {names}"
            if self.missing == "refuse":
                raise UserError(
                    f"data.path={str(self.path)!r}: {text}. Give data.missing=allow, name the "
                    "classes that all have by data.classes, or check the folders' names."
                )
            self.tell(text)

    def _hold_out(self, number: int, domain: Domain) -> None:
        n = len(domain.train)
        h = int(Decimal(str(self.test)) * n + Decimal("0.5"))
        labels = np.array([y for _, y in domain.train], np.int64)
        order = generator(0, "files to test on", number).permutation(n)
        held = set(stratified(order, labels[order], h).tolist()) if h else set()
        domain.test += [domain.train[i] for i in sorted(held)]
        domain.train = [domain.train[i] for i in range(n) if i not in held]

    def _sides(self, domains: list[Domain]) -> tuple[Side, Side | None, Side | None]:
        names: list[str] = []
        groups: list[NDArray[np.int64]] = []
        training: list[Domain] = []
        left_out: list[Domain] = []
        for number, domain in enumerate(domains):
            if domain.name in self.leave_out:
                left_out.append(domain)
                continue
            training.append(domain)
            groups.append(self._dealt(number, domain) + len(names))
            k = self.clients_per_domain
            names += [domain.name] if k == 1 else [f"{domain.name}/{j}" for j in range(k)]
        if not training:
            raise UserError("data.leave_out has all domains: leave one to train on.")
        self._tested = {domain.name: domain.test for domain in training if domain.test}
        parts = [one.train + one.test for one in left_out] or [one.test for one in domains]
        samples = self._set(chain.from_iterable(domain.train for domain in training))
        test = self._common(chain.from_iterable(parts))
        val = self._common(chain.from_iterable(domain.val for domain in domains))
        return Side(names, np.concatenate(groups), samples), test, val

    def _common(self, samples: Iterable[Sample]) -> Side | None:
        """Return samples that belong to no client."""
        made = self._set(samples)
        return Side(["all"], np.zeros(len(made), np.int64), made) if len(made) else None

    def _dealt(self, number: int, domain: Domain) -> NDArray[np.int64]:
        """Return the client of each of a domain's training samples, from 0."""
        n = len(domain.train)
        clients = np.zeros(n, np.int64)
        if self.clients_per_domain > 1:
            order = generator(self.run_seed, "domain", number).permutation(n)
            for k, part in enumerate(np.array_split(order, self.clients_per_domain)):
                clients[part] = k
        return clients

    def _set(self, samples: Iterable[Sample]) -> PictureSet:
        made = PictureSet(list(samples), self.pictures)
        self._files += [file for file in made.x if isinstance(file, Path)]
        self._sets.append(made)
        return made

    def setup(self, stage: str | None = None) -> None:
        if self.clients_per_domain > 1 and self._split_seed not in (None, self.run_seed):
            self.train_set = None  # The seed decides which of a domain's clients has which samples.
        super().setup(stage)
        undivided = self._read_as == "splits" and self.clients_per_domain == 1
        if undivided and isinstance(self.partition, ByGroup):
            raise UserError(
                f"data.path is {str(self.path)!r}, whose pictures are in splits and not in "
                "domains: give data.partition and data.num_clients, or data.layout=folders if "
                "train and val are domains."
            )
        for pictures in self._sets:
            pictures.decode(self.in_memory)
        self._sets = []

    def load(self) -> None:
        super().load()
        self.client_domains = ()
        if not isinstance(self.partition, ByGroup):
            return
        many = self.clients_per_domain > 1
        names = self.client_names
        self.client_domains = [name.rpartition("/")[0] if many else name for name in names]
        if not self._tested:
            return
        assert self.train_set is not None
        tests = list(chain.from_iterable(self._tested.values()))
        # Unless domains are left out, these samples are the global test set.
        samples = self._samples(self._set(tests)) if self.leave_out else self.test_set
        assert samples is not None
        ends = np.cumsum(list(map(len, self._tested.values())))
        places = dict(zip(self._tested, np.split(np.arange(len(tests)), ends[:-1]), strict=True))
        own: list[Any] = [places.get(domain, []) for domain in self.client_domains]
        self.own_tests = OwnTests(samples, own, len(self.train_set))


def folders_of(path: Path) -> list[str]:
    return sorted(one.name for one in path.iterdir() if one.is_dir() and one.name[0] != ".")


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
    for number, line in enumerate(file.read_text("utf-8-sig").splitlines(), 1):
        name, _, label = line.rstrip().rpartition(" ")
        if not line.strip():
            continue
        # Labels are places in a list of classes, which has to fit into memory.
        if not label.isdecimal() or len(label) > 7 or not (path / name).is_file():
            raise UserError(
                f"The list {str(file)!r} has {line[:80]!r} in line {number}: 'relative/file label' "
                f"is expected, with a file in {str(path)!r} (data.path) and the number of a class."
            )
        samples.append((path / name, int(label)))
    return samples
