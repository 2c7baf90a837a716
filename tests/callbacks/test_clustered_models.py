"""IFCA: centres part the clients; who never took part has a model, too."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fl_lightning import FederatedCallback, UserError
from fl_lightning import callbacks as c
from fl_lightning.sampling import generator
from tests.callbacks.test_identities import run
from tests.helpers.federation import quadratics
from tests.oracles.oracle import TwoLayer
from tests.oracles.problems import Quadratic

CENTRES = "ClusteredModels.centres"


def opposed() -> Quadratic:
    """Clients 0 to 3 want to be near 3, clients 4 to 7 near -3."""
    rng = np.random.default_rng(4)
    wanted = np.repeat([[3.0], [-3.0]], 4, axis=0) + 0.3 * rng.normal(size=(8, 4))
    return Quadratic(np.tile(np.eye(4), (8, 1, 1)), wanted)


def test_without_a_drawn_round_all_clients_stay_in_one_centre() -> None:
    far = np.full(4, 10.0)
    ours = quadratics(opposed(), far, [c.ClusteredModels(2, 0)], 3, participation="all")
    assert [m["clusters/share_0"] for m in ours.record.metrics] == [1.0, 1.0, 1.0]
    assert (ours.record.server[-1][CENTRES][1] == far).all(), "a centre that nobody took stays"


def test_who_never_took_part_has_the_centre_of_least_loss() -> None:
    ours = run(c.ClusteredModels(3, 1), rounds=3)
    net, centres = TwoLayer(3, 4, 3), ours.record.server[-1][CENTRES]
    took_part = {i for table in ours.schedule.rounds for i in table}
    assert len(took_part) < 8
    fitting = []
    for i in range(8):
        losses = [net.loss_and_gradient(w, *ours.schedule.data[i])[0] for w in centres]
        fitting.append(int(np.argmin(losses)))
        own = ours.module.export(client=i)
        found = torch.cat([p.detach().flatten() for p in own.parameters()]).numpy()
        assert (found == centres[fitting[-1]]).all(), i
    assert len(set(fitting)) > 1


def test_drawn_centres_follow_from_the_seed() -> None:
    ours = run(c.ClusteredModels(2, 1), rounds=1)
    order = generator(1, "ifca").permutation(8)
    (table,) = ours.schedule.rounds
    share = np.mean([order[i] % 2 == 0 for i in table])
    assert ours.record.metrics[0]["clusters/share_0"] == pytest.approx(share)


class GoesByW(FederatedCallback):
    def on_local_gradient(self, clients: Any, gradient: torch.Tensor) -> torch.Tensor:
        pulled: torch.Tensor = gradient + 0.1 * (clients.x - clients.w)
        return pulled


class Distance(GoesByW):
    """A logger of a user's own, which may look at w."""

    role = "measurement"

    def on_local_gradient(self, clients: Any, gradient: torch.Tensor) -> None:
        clients.w.norm()


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_who_reads_w_is_refused_by_name_where_it_means_nothing(engine: str) -> None:
    estimated = [c.ControlVariates("gradient")] if engine == "sequential" else []
    for method in (GoesByW(), *estimated):
        name = type(method).__name__
        says = f"ClusteredModels and {name} cannot run together: {name} uses clients.w"
        with pytest.raises(UserError, match=says):
            run(c.ClusteredModels(2), method, rounds=1, engine=engine)
    run(c.ClusteredModels(2), c.ControlVariates(), Distance(), rounds=1, engine=engine)
