"""A million clients in one file: how long a start takes, what it adds to memory, and a round.

    python -m benchmarks.clients_on_disk hdf5 --clients 1000000 --folder /tmp/clients

The file is made first (two samples of 60 numbers per client), and deleted at the end. Each start is
a process of its own, whose imports do not count.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

WIDTH = 60
CLASSES = 10


def make_hdf5(path: Path, clients: int) -> None:
    """As TFF's files lie: a group per client, in the oldest form of HDF5; goes on with a file."""
    import h5py
    from h5py import h5d, h5g, h5s, h5t

    draw = np.random.default_rng(0)
    x = draw.random((2, WIDTH), dtype=np.float32)
    rows, labels = h5s.create_simple(x.shape), h5s.create_simple((2,))
    with h5py.File(path, "a") as file:
        group = file.require_group("examples").id
        for i in range(group.get_num_objs(), clients):
            own = h5g.create(group, f"f{i:07d}".encode())
            h5d.create(own, b"x", h5t.NATIVE_FLOAT, rows).write(h5s.ALL, h5s.ALL, x)
            y = np.array([i % CLASSES, (i + 3) % CLASSES], np.int32)
            h5d.create(own, b"y", h5t.NATIVE_INT32, labels).write(h5s.ALL, h5s.ALL, y)


def make_parquet(path: Path, clients: int) -> None:
    """A row per sample, in row groups of 1,000."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    draw = np.random.default_rng(0)
    schema = pa.schema(
        [("x", pa.list_(pa.float32(), WIDTH)), ("y", pa.int64()), ("client", pa.string())]
    )
    with parquet.ParquetWriter(path, schema) as writer:
        for start in range(0, clients, 50_000):
            numbers = np.repeat(np.arange(start, min(start + 50_000, clients)), 2)
            x = pa.array(draw.random(len(numbers) * WIDTH, dtype=np.float32))
            columns = [
                pa.FixedSizeListArray.from_arrays(x, WIDTH),
                pa.array((numbers + 3 * (np.arange(len(numbers)) % 2)) % CLASSES),
                pa.array([f"f{i:07d}" for i in numbers]),
            ]
            writer.write_table(pa.table(columns, schema=schema), row_group_size=1000)


def data_module(kind: str, path: Path) -> Any:
    from fl_lightning.datamodules import FromHDF5, FromHuggingFace

    if kind == "hdf5":
        return FromHDF5(path, x="x", y="y", batch_size=2)
    return FromHuggingFace(path, "x", "y", client="client", batch_size=2)


def of_process(key: str, file: str = "status") -> int:
    """A number of this process that Linux tells."""
    for line in Path("/proc/self", file).read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1])
    return 0


def started(kind: str, path: Path) -> dict[str, float]:
    """One start, ten clients' samples, and two rounds of ten clients."""
    # What is imported at first use does not count.
    import h5py  # noqa: F401  # at first use it would count
    import torch

    from fl_lightning import FederatedModule
    from fl_lightning.machine.lightning import pl
    from fl_lightning.models import MLP, ImageClassifier

    if kind == "parquet":
        import datasets  # noqa: F401

    torch.set_num_threads(1)
    before, read = of_process("VmRSS"), of_process("rchar", "io")
    begun, processor = time.perf_counter(), time.process_time()
    data = data_module(kind, path)
    data.setup()
    found = {"start": time.perf_counter() - begun}
    found["processor seconds of it"] = time.process_time() - processor
    found["memory"] = (of_process("VmRSS") - before) / 1024
    found["read"] = (of_process("rchar", "io") - read) / 2**20
    read = of_process("rchar", "io")
    count = data.num_clients
    for client in range(0, count, count // 10):
        own = data.client_dataset(client)
        assert len([own[k] for k in range(len(own))]) == 2
    found["ten clients"] = (of_process("rchar", "io") - read) / 2**20
    module = FederatedModule(
        ImageClassifier(MLP([WIDTH, CLASSES]), CLASSES), participation=10 / count, seed=0
    )
    seconds = []

    class Clock(pl.Callback):
        def on_train_epoch_start(self, *_: Any) -> None:
            seconds.append(time.perf_counter())

    begun = time.perf_counter()
    quiet: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    quiet |= {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(max_epochs=4, callbacks=[Clock()], accelerator="cpu", **quiet)
    trainer.fit(module, data)
    found["fit's start"] = seconds[0] - begun
    found["round"] = float(np.median(np.diff(seconds)))
    found["most memory"] = of_process("VmHWM") / 1024
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["hdf5", "parquet"])
    parser.add_argument("--clients", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, default=Path("clients_on_disk"))
    parser.add_argument("--only", choices=["make", "start", "delete"])
    options = parser.parse_args()
    path = options.folder / f"train.{'h5' if options.kind == 'hdf5' else 'parquet'}"
    if options.only == "start":
        print(json.dumps({k: round(v, 3) for k, v in started(options.kind, path).items()}))
        return
    if options.only != "delete":
        options.folder.mkdir(parents=True, exist_ok=True)
        begun = time.perf_counter()
        {"hdf5": make_hdf5, "parquet": make_parquet}[options.kind](path, options.clients)
        size = path.stat().st_size / 2**30
        print(f"made {size:.2f} GiB in {time.perf_counter() - begun:.0f} s", flush=True)
    if options.only is None:
        command = [sys.executable, "-m", "benchmarks.clients_on_disk", options.kind]
        command += ["--folder", str(options.folder), "--only", "start"]
        for which in ("first", "second"):
            print(which, subprocess.run(command, check=True, stdout=-1, text=True).stdout.strip())
    if options.only in (None, "delete"):
        shutil.rmtree(options.folder)


if __name__ == "__main__":
    main()
