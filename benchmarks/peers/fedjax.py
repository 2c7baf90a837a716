"""fedjax's federated_averaging with its jit backend, on the networks written in jax."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import fedjax
import jax
import optax
import torch
from fedjax.algorithms import fed_avg
from jax import lax
from jax import numpy as jnp

from benchmarks.peers import Missing, Peer, Rounds
from benchmarks.workloads import LR, SmallConvolutions, Workload
from fl_lightning.models import MLP, LeNet

if not hasattr(jax, "tree_map"):
    # what newer jax no longer has and fedjax 0.0.17 still calls
    jax.tree_map = jax.tree_util.tree_map

Parameters = dict[str, Any]


def linear(p: Parameters, name: str, x: Any) -> Any:
    return x @ p[f"{name}.weight"] + p[f"{name}.bias"]


def convolution(p: Parameters, name: str, x: Any) -> Any:
    y = lax.conv_general_dilated(
        x, p[f"{name}.weight"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jax.nn.relu(y + p[f"{name}.bias"])


def pool(x: Any) -> Any:
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


def mlp(p: Parameters, x: Any) -> Any:
    x = jax.nn.relu(linear(p, "layers.0", x.reshape(len(x), -1)))
    return linear(p, "layers.4", jax.nn.relu(linear(p, "layers.2", x)))


def lenet(p: Parameters, x: Any) -> Any:
    x = pool(convolution(p, "conv2", pool(convolution(p, "conv1", x))))
    x = jax.nn.relu(linear(p, "fc1", x.reshape(len(x), -1)))
    return linear(p, "fc3", jax.nn.relu(linear(p, "fc2", x)))


def small_convolutions(p: Parameters, x: Any) -> Any:
    x = pool(convolution(p, "2", convolution(p, "0", x)))
    return linear(p, "8", jax.nn.relu(linear(p, "6", x.reshape(len(x), -1))))


NETWORKS: dict[type, Callable[[Parameters, Any], Any]] = {
    MLP: mlp,
    LeNet: lenet,
    SmallConvolutions: small_convolutions,
}
# of biases, matrices and kernels, from torch's to jax's
LAYOUTS = {1: (0,), 2: (1, 0), 4: (2, 3, 1, 0)}


def play(work: Workload, peer: Peer, rounds: Rounds) -> None:
    if work.methods:
        raise Missing(f"it has no {' + '.join(work.methods)}")
    torch.manual_seed(0)
    network = work.others()
    if type(network) not in NETWORKS or work.adam:
        raise Missing(f"{type(network).__name__} is not written in jax")
    forward = NETWORKS[type(network)]
    start = {
        k: jnp.asarray(v.permute(LAYOUTS[v.dim()]).numpy()) for k, v in network.state_dict().items()
    }
    own = [
        fedjax.ClientDataset({"x": x.permute(0, 2, 3, 1).contiguous().numpy(), "y": y.numpy()})
        for x, y in work.parts()
    ]
    steps = work.epochs * -(-work.samples // work.batch_size)

    def loss(p: Parameters, batch: Parameters) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(
            forward(p, batch["x"]), batch["y"]
        ).mean()

    def gradients(p: Parameters, batch: Parameters, rng: Any) -> Parameters:
        value, gradient = jax.value_and_grad(loss)(p["network"], batch)
        # FedAvg gives no losses: a number that every step raises by LR times the loss is averaged
        # with the weights
        return {"network": gradient, "loss": -value}

    decay = optax.add_decayed_weights(work.weight_decay, mask={"network": True, "loss": False})
    with fedjax.for_each_client_backend("jit"):
        algorithm = fed_avg.federated_averaging(
            gradients,
            fedjax.optimizers.create_optimizer_from_optax(optax.chain(decay, optax.sgd(LR))),
            fedjax.optimizers.sgd(1.0),
            fedjax.ShuffleRepeatBatchHParams(batch_size=work.batch_size, num_epochs=work.epochs),
        )
    state = algorithm.init({"network": start, "loss": jnp.zeros(())})
    keys = jax.random.split(jax.random.PRNGKey(0), work.clients)

    def round() -> float:
        nonlocal state
        before = float(state.params["loss"])
        state, _ = algorithm.apply(
            state, [(b"%d" % i, data, keys[i]) for i, data in enumerate(own)]
        )
        jax.block_until_ready(state.params)
        return (float(state.params["loss"]) - before) / (LR * steps)

    rounds(round)
