"""Faults of runs without a server: slips of published codes, and what mixing can get wrong."""

from __future__ import annotations

from tests.faults.faults_list import Fault

EXCHANGE = "fl_lightning/aggregation/exchange.py"
NEIGHBOURHOOD = "fl_lightning/round/neighbourhood.py"
ALL, GOSSIP, PUSH, TRACKING = (
    f"callbacks/decentralised/{name}.py"
    for name in ("without_server", "gossip", "push_sum", "gradient_tracking")
)
MESSAGES = "return Neighbourhood(links.senders[both], links.receivers[both], weights[both])"

DECENTRALISED_FAULTS = [
    Fault(
        "DFedCata: neighbours with lower numbers have already mixed",
        [
            (
                EXCHANGE,
                "values = {client: mixed(addends[client], known) for client in self.mine}",
                "values = {\n"
                "    client: known.__setitem__(client, mixed(addends[client], known))\n"
                "    or known[client]\n"
                "    for client in self.mine\n"
                "}",
            )
        ],
    ),
    Fault(
        "gossip: neighbours give the models of the latest round",
        [(GOSSIP, "self.z[clients] = clients.x", "self.z[clients] = self.x[clients]")],
    ),
    Fault(
        "gossip: clients start at w",
        [(ALL, "clients.x = self.model(clients)\n", "clients.x = clients.w\n")],
    ),
    Fault(
        "on_exchange reads rows as they were before the round",
        [
            (
                EXCHANGE,
                "return self.transaction.round.read(key, client) if row is None else row",
                "return self.transaction.round.read(key, client)",
            )
        ],
    ),
    Fault(
        "gossip: weights are transposed",
        [
            (
                ALL,
                MESSAGES,
                "return Neighbourhood(links.receivers[both], links.senders[both], weights[both])",
            )
        ],
    ),
    Fault(
        "gossip: the weight of absent neighbours is lost",
        [
            (
                ALL,
                MESSAGES,
                "whole = np.bincount(links.senders, weights, minlength=m).tolist()\n"
                "        Neighbourhood.sent = dict(enumerate(whole))\n"
                f"        {MESSAGES}",
            ),
            (
                NEIGHBOURHOOD,
                "(i, 1.0 - sent.get(i, 0.0))",
                '(i, 1.0 - getattr(self, "sent", sent).get(i, 0.0))',
            ),
        ],
    ),
    Fault(
        "gossip: the weight of absent neighbours goes to the others",
        [
            (
                ALL,
                "        weights = weights_in(self, m, self._version(t), seed)\n",
                "        weights = weights_in(self, m, self._version(t), seed)\n"
                "        whole = np.bincount(links.senders, weights, minlength=m)\n"
                "        there = np.bincount(links.senders[both], weights[both], minlength=m)\n"
                "        weights = weights * (whole / np.maximum(there, 1e-9))[links.senders]\n",
            )
        ],
    ),
    Fault(
        "gossip: w moves by the mean over participants",
        [(ALL, "server.update *= server.n / server.num_clients", "pass")],
    ),
    Fault(
        "gossip: consensus leaves out clients that did not take part",
        [(ALL, "self.squares += self.spread.sum()", "self.squares = self.spread.sum()")],
    ),
    Fault(
        "gossip: what is kept is exchanged, and the rest kept",
        [(ALL, "else ~self._kept", "else self._kept")],
    ),
    Fault(
        "DFedSAM-MGS: the first exchange is the only one",
        [(EXCHANGE, "for _ in range(neighbourhood.steps):", "for _ in range(1):")],
    ),
    Fault(
        "DFedAvg: the self-loop is no neighbour in uniform weights",
        [
            (
                GOSSIP,
                "weights = inverse(links.received[links.receivers])",
                "weights = inverse(links.received[links.receivers] - 1)",
            )
        ],
    ),
    Fault(
        "SGP: clients train from their numerators, without ω",
        [(PUSH, "y = x / self.weight[clients][:, None].to(x)", "y = x")],
    ),
    Fault(
        "SGP: ω is not exchanged",
        [(PUSH, "self.weight[clients] = self.omega[clients]", "pass")],
    ),
    Fault(
        "SGP: a message has the receiver's weight",
        [(PUSH, "inverse(links.sent[links.senders])", "inverse(links.received[links.receivers])")],
    ),
    Fault(
        "K-GT: the tracker is updated before the exchange, and exchanged",
        [
            (
                TRACKING,
                "self.mean[clients] = mean\n        self.c_i[clients] -= mean",
                "self.c_i[clients] -= mean\n        self.mean[clients] = -self.c_i[clients]",
            )
        ],
    ),
    Fault(
        "K-GT: what the client sends stays in its tracker",
        [(TRACKING, "        self.c_i[clients] -= mean\n", "")],
    ),
]
