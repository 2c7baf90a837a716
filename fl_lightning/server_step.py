"""The end of a round at the server: aggregate, update, step, evaluate what is kept, commit, and say what happened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from fl_lightning.aggregation import sum_over_processes
from fl_lightning.callback import ClientState, ServerState
from fl_lightning.client_optimizer import is_plain_sgd
from fl_lightning.collect import BUFFER_BYTES, DOWN_CLIENTS, MISSING, UP_BYTES, UP_PARAMETERS, Collector
from fl_lightning.errors import Diverged
from fl_lightning.flat import all_finite
from fl_lightning.rounds import Round, Server

if TYPE_CHECKING:
    from fl_lightning.module import FederatedModule


def conclude(module: FederatedModule, round: Round, collector: Collector) -> dict[str, float]:
    """Everything after the last client; returns what is logged."""
    methods = module.methods
    skipped = agree(module, collector)
    round.finished = [i for i in round.ids if i not in skipped]
    total = sum_over_processes(collector.tree.total) or {}
    round.total, round.at_server = total, True
    w_before = round.w.clone()
    server = Server(round, module.global_vector.detach())
    server.w_before = w_before
    server.averaged = collector.averaged
    if round.finished:
        aggregate = methods.owner("aggregate")
        server.update = (total["weighted"] / total["weight"].to(round.wide)).to(round.w.dtype)
        if aggregate:
            server.update = aggregate(server).to(round.w.dtype)
        methods.run("on_server_update", server)
        if server.averaged is not None:
            server.update = torch.where(server.averaged, server.update, 0.0)
        if not all_finite(server.update):
            raise Diverged(diverged_text(round.t, "the server's update"))
    else:
        server.update = torch.zeros_like(round.w)
    step_server_optimizer(module, server)
    if not all_finite(server.w):
        raise Diverged(diverged_text(round.t, "the server's model"))
    module.set_evaluated(evaluated(round, server, w_before))
    server.evaluated = module.evaluated_vector.detach()
    average_buffers(module, total)
    server.communication = traffic(module, round, server)
    warn_of_mean_gradient(module, round)
    if round.finished:
        methods.run("on_round_end", server)
        commit(module, round, server)
    return logged(round, server)


def agree(module: FederatedModule, collector: Collector) -> set[int]:
    """Clients whose update is not finite, and whether to stop, the same in every process."""
    diverged, stop = [collector.diverged], [module.stop_requested]
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        said: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(said, (collector.diverged, module.stop_requested))
        diverged, stop = [d for d, _ in said], [s for _, s in said]
    module.trainer.should_stop = module.trainer.should_stop or any(stop)
    clients = sorted(i for group in diverged for i in group)
    if clients and module.on_nonfinite == "stop":
        raise Diverged(diverged_text(collector.round.t, f"the update of client {clients[0]}"))
    if clients:
        module.note(f"round {collector.round.t}: clients {clients} were left out, their updates are not finite")
    return set(clients)


def diverged_text(t: int, what: str) -> str:
    return (
        f"the run diverged: {what} in round {t} is not finite. Lower the client learning rate, set clip_norm (10 is "
        "common), or leave such clients out with on_nonfinite='skip'."
    )


def warn_of_mean_gradient(module: FederatedModule, round: Round) -> None:
    """Say where ``clients.mean_gradient`` was read, but is not the mean of the steps' gradients."""
    if not round.mean_gradient_read:
        return
    what = "a method of this run takes displacement / (η K) for the mean gradient of the local steps, which it is not"
    if not is_plain_sgd(module._client):
        module.note(f"{what} with {type(module._client).__name__} other than plain SGD (10 × with momentum 0.9)")
    if float(round.total.get("log:clipped_steps", 0)) > 0:
        module.note(f"{what} while clipping is active (clip_norm={module.clip_norm:g})")


def step_server_optimizer(module: FederatedModule, server: Server) -> None:
    """One step with gradient -update; w and (D,)-shaped state stay where a part is not averaged, or nobody finished."""
    optimizer: Any = module.optimizers()
    w = module.global_vector
    keep: Tensor | None = server.averaged if server.n else torch.zeros_like(w, dtype=torch.bool)
    state = optimizer.optimizer.state
    before = {}
    if keep is not None:
        held = {k: v.clone() for k, v in state.get(w, {}).items() if isinstance(v, Tensor)}
        before = {"": w.detach().clone(), **held}
    w.grad = server.update.neg()
    optimizer.step()
    w.grad = None
    if keep is not None:
        with torch.no_grad():
            w.copy_(torch.where(keep, w, before.pop("")))
            for name, value in state.get(w, {}).items():
                if isinstance(value, Tensor) and value.shape == w.shape:
                    value.copy_(torch.where(keep, value, before.get(name, torch.zeros_like(value))))


def evaluated(round: Round, server: Server, w_before: Tensor) -> Tensor | None:
    """Under partial averaging, w with parts not averaged replaced by the clients' mean there; None where it is w."""
    if round.parts is None or server.averaged is None or not server.n or bool(server.averaged.all()):
        return None
    mean = w_before + (round.total["copies"] / round.total["weight"].to(round.wide)).to(w_before)
    return torch.where(server.averaged, server.w.detach(), mean)


def average_buffers(module: FederatedModule, total: dict[str, Tensor]) -> None:
    for name, buffer in module.learner.named_buffers():
        if "buffer:" + name in total:
            change = total["buffer:" + name]
            buffer.copy_((buffer.to(change) + change / total["weight"].to(change)).to(buffer))
        elif "max:" + name in total:
            buffer.copy_(total["max:" + name])


def commit(module: FederatedModule, round: Round, server: Server) -> None:
    """Staged rows and server state become the state, all at once."""
    round.server_state_in_place()
    averaged = server.averaged
    for key, value in round.staged_server.items():
        declared = module.methods.declared[key]
        assert isinstance(declared, ServerState)
        if averaged is not None and declared.synchronised and value.shape == averaged.shape:
            old = round.server_states.get(key)
            old = round.initial(declared.initial, declared.shape, declared.dtype) if old is None else old
            round.staged_server[key] = torch.where(averaged, value, old)
    rows = {}
    for key, by_client in round.staged.items():
        declaration = module.methods.declared.get(key)
        if declaration is not None and not isinstance(declaration, ClientState):
            continue
        if averaged is not None and declaration is not None and declaration.synchronised:
            mask = averaged.cpu()
            for client, row in by_client.items():
                old = round.read(key, client)
                old = (
                    round.initial(declaration.initial, declaration.shape, declaration.dtype).cpu()
                    if old is None
                    else old
                )
                by_client[client] = torch.where(mask, row, old)
        rows[key] = by_client
    module.client_rows.commit(rows, round.ids)
    module.server_states.update(round.staged_server)


def traffic(module: FederatedModule, round: Round, server: Server) -> dict[str, int]:
    """Parameters and bytes of this round, all participants together (methods.md's table, in numbers)."""
    counts = round.total.get("traffic")
    if counts is None:
        return dict.fromkeys(("down_parameters", "down_bytes", "up_parameters", "up_bytes", "buffers_bytes"), 0)
    count = [int(c) for c in counts]
    size = round.w.element_size()
    down, down_bytes = count[MISSING], count[MISSING] * size
    exists = set(module.server_states) | set(round.staged_server)
    for key, declared in module.methods.sent_to_clients().items():
        if key not in exists:
            continue
        value = round.staged_server.get(key, module.server_states.get(key))
        assert value is not None
        numbers = count[MISSING] if declared.shape is None else count[DOWN_CLIENTS] * value.numel()
        down, down_bytes = down + numbers, down_bytes + numbers * value.element_size()
    return {
        "down_parameters": down,
        "down_bytes": down_bytes,
        "up_parameters": count[UP_PARAMETERS],
        "up_bytes": count[UP_BYTES],
        "buffers_bytes": 2 * count[BUFFER_BYTES],
    }


def logged(round: Round, server: Server) -> dict[str, float]:
    total = round.total
    values = {k[4:]: total[k] / total["num:" + k[4:]] for k in total if k.startswith("log:")}
    numbers = {name: float(value) for name, value in values.items()}
    return numbers | {name: float(value) for name, value in server.logs.items()}
