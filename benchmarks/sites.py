"""``python -m benchmarks.sites``: a round over sites beside an empty app's, by Flower on loopback.

A link and three nodes with three clients of the digits each; before each round of SCAFFOLD the same
nodes are sent the same arrays once more, which come back as they are. It needs the extra `flower`
(``.venv-flower/bin/python``, which ``make test-flower`` makes).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import yaml

from fl_lightning.__main__ import main as fl_lightning
from tests.deploy.flower_runs import Federation

SITES = {"north": "0,3,8", "south": "1,2,7", "west": "4,5,6"}
SERVER = """from flwr.serverapp import ServerApp
from sites_app.empty import Watched
from fl_lightning.deploy.flower import serve

app = ServerApp()

@app.main()
def main(grid, context):
    serve(Watched(grid), context, __file__)
"""
CLIENT = """from flwr.app import Message
from flwr.clientapp import ClientApp

app = ClientApp()

@app.query()
def query(message, context):
    return Message(message.content, reply_to=message)

@app.train()
def train(message, context):
    from fl_lightning.deploy.flower import answer

    return answer(message, context, __file__)
"""
EMPTY = '''import time
from flwr.app import Message, MessageType
import pytorch_lightning as pl

class Watched:
    """Flower's grid, which remembers what each node was sent last."""
    def __init__(self, grid):
        self.grid = grid
        self.sent = {}
        Watched.present = self

    def __getattr__(self, name):
        return getattr(self.grid, name)

    def push_messages(self, messages):
        for message in messages:
            self.sent[message.metadata.dst_node_id] = message.content
        return self.grid.push_messages(messages)

class Empty(pl.Callback):
    """Before a round, one of an empty app with the arrays of the one before."""
    def __init__(self, file):
        self.file = file

    def on_train_epoch_start(self, trainer, pl_module):
        watched = Watched.present
        start = time.perf_counter()
        waiting = set()
        for node, content in watched.sent.items():
            message = Message(content, dst_node_id=node, message_type=MessageType.QUERY)
            waiting |= set(watched.grid.push_messages([message]))
        pause = 0.1
        while waiting:
            for reply in watched.grid.pull_messages(list(waiting)):
                waiting.discard(reply.metadata.reply_to_message_id)
            if waiting:
                time.sleep(pause)
                pause = min(1.5 * pause, 1.0)
        with open(self.file, "a") as file:
            file.write(f"{time.perf_counter() - start}\\n")
'''


def written(folder: Path, rounds: int) -> Path:
    """The app, whose nodes answer to empty messages, too."""
    app = folder / "app"
    options = ["--data.num_clients", "9", "--trainer.max_epochs", str(rounds)]
    options += ["--model.participation", "all", "--model.engine", "sequential"]
    configs = ["base", "data/digits", "method/scaffold"]
    if fl_lightning(["deploy", "flower", *configs, *options, "--out", str(app)]):
        raise SystemExit("the app was not written")
    for name, text in (("server_app", SERVER), ("client_app", CLIENT), ("empty", EMPTY)):
        (app / "sites_app" / f"{name}.py").write_text(text, "utf-8")
    config = yaml.safe_load((app / "config.yaml").read_text("utf-8"))
    empty = {"class_path": "sites_app.empty.Empty", "init_args": {"file": str(folder / "empty")}}
    config["trainer"]["callbacks"] = [*(config["trainer"].get("callbacks") or []), empty]
    (app / "config.yaml").write_text(yaml.safe_dump(config), "utf-8")
    return app


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sites", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=Path("sites.json"))
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error("--rounds has to be at least 1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # The first, in which nodes begin, is not counted.
        app = written(folder, given.rounds + 1)
        federation = Federation(folder)
        try:
            federation.link()
            for site, clients in SITES.items():
                federation.node(site, f'clients="{clients}"')
            over = federation.run(app, folder="over", rounds=given.rounds + 1, min_sites=3)
            federation.wait("the end of the run", lambda: over.poll() is not None, 1800)
            text = federation.log("run")
        finally:
            federation.close()
        table = folder / "over" / "metrics.csv"
        if not table.is_file():
            raise SystemExit(text)
        rows = table.read_text("utf-8").strip().split("\n")
        column = rows[0].split(",").index("time/round")
        ours = [float(row.split(",")[column]) for row in rows[2:]]
        empty = [float(line) for line in (folder / "empty").read_text().split()][1:]
    given.json.write_text(json.dumps({"ours": ours, "empty": empty}, indent=1) + "\n")
    pairs = list(zip(ours, empty, strict=True))
    for what, seconds in (("over sites", ours), ("an empty app", empty)):
        print(f"{what:13}{statistics.median(seconds):7.2f} s a round (median of {len(seconds)})")
    print(f"more, pair by pair{statistics.median(a - b for a, b in pairs):+7.2f} s (median)")


if __name__ == "__main__":
    main()
