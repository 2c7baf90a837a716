"""The oracle: every federated method and composition in NumPy float64, one vector of D numbers a
model. Plain loops over clients and steps, written from the papers' algorithms and from nothing of
the package, so that a wrong implementation cannot agree with it. § n is the section of the methods
page that a block follows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.oracles import compression, robust
from tests.oracles.looking import Looking
from tests.oracles.modern import Modern
from tests.oracles.problems import Problem, Quadratic, Schedule, TwoLayer, Vector, local_steps

__all__ = ["Config", "Quadratic", "Round", "Schedule", "TwoLayer", "local_steps", "run", "vectors"]

Mask = npt.NDArray[np.bool_]
Coefficient = float | Callable[[int], float]  # a number, or a function of the round


@dataclass(frozen=True)
class Config:
    """One field a component; None is "not there". They compose as the callbacks do."""

    lr: float = 0.1
    lr_decay: Coefficient = 1.0  # a number: lr * lr_decay ** t; a function: lr * lr_decay(t)
    weight_decay: float = 0.0
    momentum: float = 0.0  # of the client's SGD
    keep_momentum: bool = False  # over rounds
    clip_norm: float | None = None
    weighting: str = "uniform"  # or "samples"
    # ("sgd", lr), ("sgdm", lr, momentum) or ("adam" | "yogi" | "adagrad", lr, b1, b2, tau)
    server: tuple[Any, ...] = ("sgd", 1.0)
    server_lr_decay: Coefficient = 1.0
    beta: Coefficient | None = None  # relaxed initialization
    aggregate: str = "models"  # or "updates": its second rule
    offset: str = "own"  # of it; or "mean", "centred": its controls
    mu: Coefficient | None = None  # FedProx
    scaffold: str | None = None  # "displacement" or "gradient"
    feddyn: Coefficient | None = None  # penalty a
    alpha: Coefficient | None = None  # FedCM
    sam: Coefficient | None = None  # radius
    # radius of the corrected perturbation; FedSMOO is this and feddyn
    fedsmoo: Coefficient | None = None
    parts: Sequence[tuple[Mask, int | None]] = ()  # (coordinates, period; None: never averaged)
    # penalty, alpha, radius, whether it is normalised, "all" or "participants"
    fedspeed: tuple[float, float, float, bool, str] | None = None
    lesam: Coefficient | None = None  # radius of FedLESAM's perturbation
    lesam_source: str = "received"  # or "last"
    fedexp: tuple[float, bool] | None = None  # epsilon, and whether two models are averaged
    ifca: tuple[int, int] | None = None  # centres, and rounds in which client i gets
    ifca_order: Sequence[int] = ()  # centre ifca_order[i] mod k
    scaffnew: float | None = None  # probability of communication
    fednova: bool = False
    topk: float | None = None  # fraction that is sent, with error feedback
    compression: dict[str, Any] | None = None  # "kind" and its arguments, in compression.py
    broadcast: int | None = None  # levels of what the server sends down
    fedrep: tuple[Mask, float, int] | None = None  # head, its epochs, batch size
    ditto: Coefficient | None = None  # strength lambda
    pfedme: tuple[float, int, float] | None = None  # lambda, inner steps, inner rate
    robust: dict[str, Any] | None = None  # rule and its arguments, in place of the mean
    moon: tuple[Coefficient, float] | None = None  # mu, temperature
    fedntd: tuple[Coefficient, float] | None = None  # beta, temperature
    fedlc: tuple[Coefficient, bool] | None = None  # tau, the true class left out
    scaffold_momentum: float | None = None  # FedMoSWA's rule of c
    modern: Mapping[str, Any] = field(default_factory=dict)  # components in modern.py
    attack: tuple[str, float | None] | None = None  # which, and its scale; of whom:
    attackers: tuple[int, ...] = ()
    noise: Callable[[int, int, int], Vector] | None = None  # (round, client, D) -> N(0, I)


@dataclass
class Round:
    """What there is after a round. clients[name][i] is a row, absent before it is first written."""

    w: Vector
    evaluated: Vector
    clients: dict[str, dict[int, Vector]]
    server: dict[str, Vector]
    x: dict[int, Vector]  # x_{i,K} of the participants
    start: dict[int, Vector]  # x_{i,0}
    clipped_steps: int
    down: dict[int, int]  # numbers sent to each participant
    up: dict[int, int]
    metrics: dict[str, float]
    personal: dict[int, Vector] = field(default_factory=dict)


def at(value: Coefficient, t: int) -> float:
    return float(value(t)) if callable(value) else float(value)


def decayed(base: float, decay: Coefficient, t: int) -> float:
    return base * (float(decay(t)) if callable(decay) else float(decay) ** t)


def exact_ceil(share: float, whole: int) -> int:
    return math.ceil(Fraction(str(share)) * whole)


def to_length(v: Vector, length: float) -> Vector:
    norm = float(np.linalg.norm(v))
    return length * v / norm if norm > 0 else np.zeros_like(v)


def vectors(config: Config) -> tuple[int, int, int]:
    """Vectors of D down, up, and kept by a client beside what it keeps of parts (§ 12)."""
    ri, scaffold, smoo = (
        config.beta is not None,
        config.scaffold is not None,
        config.fedsmoo is not None,
    )
    feddyn, fedcm = config.feddyn is not None, config.alpha is not None
    updates = ri and config.aggregate == "updates"
    mean = ri and config.offset != "own"  # the mean of what clients ended with travels
    lesam, sent = config.lesam is not None, config.lesam_source == "last"
    down = 1 + scaffold + fedcm + smoo + mean + (lesam and sent)
    up = 1 + scaffold + smoo + (fedcm and ri and not updates) + (feddyn and updates) + mean
    personal = (config.ditto is not None) + (config.pfedme is not None)
    down += 0 if config.ifca is None else config.ifca[0] - 1  # the centres in place of w
    feddyn = config.fedspeed is not None or feddyn  # keeps and sends as FedDyn, and in up:
    # Its displacement, if the server cannot compute it from what is sent.
    apart = updates or config.compression is not None
    up += config.fedspeed is not None and config.fedspeed[4] == "all" and apart
    kept = ri + scaffold + feddyn + smoo + (config.topk is not None) + (lesam and not sent)
    kept += (config.moon is not None) + 2 * (config.scaffnew is not None)
    return down, up, kept + personal


def server_step(
    w: Vector, d: Vector, rule: tuple[Any, ...], lr: float, state: dict[str, Vector]
) -> tuple[Vector, dict[str, Vector]]:
    kind = rule[0]
    if kind == "sgd":
        return w + lr * d, {}
    if kind == "sgdm":
        m = rule[2] * state.get("m", np.zeros_like(w)) + d
        return w + lr * m, {"m": m}
    # § 3, Reddi et al., 2021, Algorithm 2: m from 0, v from tau^2, no bias correction.
    b1, b2, tau = rule[2:]
    m = b1 * state.get("m", np.zeros_like(w)) + (1 - b1) * d
    v = state.get("v", np.full_like(w, tau**2))
    if kind == "adagrad":
        v = v + d**2
    elif kind == "yogi":
        v = v - (1 - b2) * d**2 * np.sign(v - d**2)
    elif kind == "adam":
        v = b2 * v + (1 - b2) * d**2
    else:
        raise ValueError(f"server rule {kind!r}")
    return w + lr * m / (np.sqrt(v) + tau), {"m": m, "v": v}


def looking(
    network: Problem, cfg: Config, t: int, w: Vector, last: Vector, labels: Any, i: int
) -> Looking:
    """Client i's loss in round t, changed by MOON, FedNTD or FedLC."""
    assert isinstance(network, TwoLayer)
    if cfg.attack is not None and cfg.attack[0] == "label_flip" and i in cfg.attackers:
        labels = 2 - labels
    counts = np.bincount(labels, minlength=3).astype(np.float64)
    return Looking(
        network,
        w,
        last,
        counts,
        None if cfg.moon is None else (at(cfg.moon[0], t), cfg.moon[1]),
        None if cfg.fedntd is None else (at(cfg.fedntd[0], t), cfg.fedntd[1]),
        None if cfg.fedlc is None else (at(cfg.fedlc[0], t), cfg.fedlc[1]),
    )


def run(
    problem: Problem, config: Config, rounds: int, w0: Vector, schedule: Schedule
) -> list[Round]:
    """Rounds 0 … rounds - 1 from w0. Entry t holds what there is after round t (its `w` is
    w^{t+1})."""
    cfg, D, m = config, len(w0), len(schedule.sizes)
    network = problem
    modern = None
    if cfg.modern:
        assert isinstance(network, TwoLayer)
        modern = Modern(network, schedule, w0, cfg.modern, cfg.weight_decay)
    own_parts = [] if modern is None or not modern.kept().any() else [(modern.kept(), None)]
    parts = [*cfg.parts, *own_parts, *([] if cfg.fedrep is None else [(cfg.fedrep[0], None)])]
    if cfg.parts and (cfg.fedsmoo is not None or cfg.fednova or cfg.topk is not None):
        raise ValueError("FedSMOO, FedNova and top-k are not defined with partial averaging")
    if cfg.parts and cfg.offset != "own":
        raise ValueError(
            "the controls of relaxed initialization are not defined with partial averaging"
        )
    perturbing = (cfg.sam, cfg.fedsmoo, cfg.lesam, cfg.fedspeed)
    if sum(given is not None for given in perturbing) > 1:
        raise ValueError("two perturbations")
    zeros = np.zeros(D)
    w0 = np.array(w0, dtype=np.float64)
    w = w0.copy()
    optimizer: dict[str, Vector] = {}
    c, lam, s, Delta = zeros.copy(), zeros.copy(), zeros.copy(), zeros.copy()
    c_i: dict[int, Vector] = {}
    lambda_i: dict[int, Vector] = {}
    mu_i: dict[int, Vector] = {}
    e_i: dict[int, Vector] = {}
    momentum_i: dict[int, Vector] = {}
    v_i: dict[int, Vector] = {}
    theta_i: dict[int, Vector] = {}
    o_i: dict[int, Vector] = {}  # § 20 B
    dual_i: dict[int, Vector] = {}  # § 20 A
    dual_mean = zeros.copy()
    h_i: dict[int, Vector] = {}  # § 20 I
    centres = np.tile(w0, (1 if cfg.ifca is None else cfg.ifca[0], 1))  # § 20 H
    previous = w
    last_i: dict[int, Vector] = {}
    # § 11, parts: where a client's copy is valid, where its displacement began, the sum of eta K
    # since.
    valid: dict[int, Mask] = {}
    origin: dict[int, Vector] = {}
    elapsed: dict[int, Vector] = {}
    sent = {"down": 0, "up": 0}
    up_bytes = 0
    down_bytes = 0
    sender = None
    if cfg.compression is not None:
        sender = compression.Sender(cfg.compression, getattr(problem, "shapes", [(D,)]))
    history: list[Round] = []

    for t in range(rounds):
        cohort = sorted(schedule.rounds[t])
        n = len(cohort)
        eta = decayed(cfg.lr, cfg.lr_decay, t)
        total = sum(schedule.sizes[i] for i in cohort)
        p = {
            i: schedule.sizes[i] / total if cfg.weighting == "samples" else 1.0 / n for i in cohort
        }
        K = {i: len(schedule.rounds[t][i]) for i in cohort}
        averaged = np.ones(D, dtype=bool)
        for part, period in parts:
            averaged[part] = period is not None and (t + 1) % period == 0
        x_0: dict[int, Vector] = {}
        x_K: dict[int, Vector] = {}
        u: dict[int, Vector] = {}
        mean_c_change, U, mean_velocity = zeros.copy(), zeros.copy(), zeros.copy()
        clipped = 0
        down, up = {}, {}
        chosen: dict[int, int] = {}
        vectors_down, vectors_up, _ = vectors(cfg)
        at_server, down_bits = w, 64 * D
        if cfg.broadcast is not None:  # § 20 J, downlink: what clients are given is their w
            layers = getattr(problem, "shapes", [(D,)])
            w, down_bits = compression.broadcast(w, w0, cfg.broadcast, layers, t)

        if modern is not None:
            w = modern.broadcast(w)
            modern.given, modern.eta, modern.averaged = w, eta, averaged
        given = w
        ends: dict[int, Any] = {}
        for i in cohort:
            # The start: w, with the parts that the client keeps (§ 11); relaxed initialization (§
            # 10).
            kept = valid.get(i, np.zeros(D, dtype=bool))
            x = np.where(kept, last_i.get(i, w0), w)
            if cfg.ifca is not None:  # IFCA, § 20 H
                if t < cfg.ifca[1]:
                    chosen[i] = int(cfg.ifca_order[i]) % len(centres)
                else:
                    losses = [problem.loss_and_gradient(z, *schedule.data[i])[0] for z in centres]
                    chosen[i] = int(np.argmin(losses))
                x = centres[chosen[i]].copy()
            if cfg.beta is not None:
                own, mean = last_i.get(i, w0), sum((last_i.get(j, w0) for j in range(m)), zeros) / m
                away = {"own": x - own, "mean": x - mean, "centred": mean - own}[cfg.offset]
                x = x + at(cfg.beta, t) * away
            if modern is not None:
                x = modern.start(i, x)
                state = modern.begin(i)
            x_0[i] = x.copy()
            origin[i] = np.where(kept, origin.get(i, zeros), x_0[i])
            moving = np.full(D, K[i])
            if cfg.fedrep is not None:  # § 17: of the K steps really taken, a part takes some
                head, epochs, size = cfg.fedrep
                first = min(K[i], local_steps(schedule.sizes[i], size, epochs))
                moving = np.where(head, first, K[i] - first)
            if modern is not None:
                moving = moving * (sum(modern.rate(k, K[i]) for k in range(K[i])) / K[i])
            elapsed[i] = np.where(kept, elapsed.get(i, zeros), 0.0) + eta * moving
            down[i] = vectors_down * int((~kept).sum())
            down_bytes += 8 * (vectors_down - 1) * D + math.ceil(down_bits / 8)
            up[i] = vectors_up * int(averaged.sum())

            if cfg.scaffnew is not None:  # § 20 I: with the rate of the round that is over
                over = zeros
                if t > 0:
                    over = (cfg.scaffnew / decayed(cfg.lr, cfg.lr_decay, t - 1)) * (w - last_i[i])
                h_i[i] = h_i.get(i, zeros) + over

            buffer = momentum_i.get(i, zeros) if cfg.keep_momentum else zeros
            dual = mu_i.get(i, zeros)  # FedSMOO's mu_i
            e, theta, rests = zeros, w, np.zeros(D, dtype=bool)
            if cfg.lesam is not None:  # FedLESAM, § 20 B: one e all round
                old = previous if cfg.lesam_source == "last" else o_i.get(i, w)
                e_round = to_length(old - w, at(cfg.lesam, t))
                o_i[i] = w
            if cfg.moon is not None or cfg.fedntd is not None or cfg.fedlc is not None:
                problem = looking(network, cfg, t, w, last_i.get(i, w), schedule.data[i][1], i)
            for k, batch in enumerate(schedule.rounds[t][i]):
                # § 18, 3 classes
                if cfg.attack is not None and cfg.attack[0] == "label_flip" and i in cfg.attackers:
                    batch = (batch[0], 2 - batch[1])
                if cfg.ditto is not None:  # § 17: its own model, before x moves
                    v = v_i.get(i, w0)
                    v_gradient = problem.gradient(v, i, batch) + cfg.weight_decay * v
                    v_i[i] = v - eta * (v_gradient + at(cfg.ditto, t) * (v - w))
                # § 1, a local step: (1) the gradient of the loss, (2) at a perturbed point (§ 8, §
                # 9)
                if modern is not None:
                    g = modern.loss_gradient(x, i, k, batch, state)
                else:
                    g = problem.gradient(x if cfg.lesam is None else x + e_round, i, batch)
                if cfg.pfedme is not None:  # § 17: the gradient of the envelope
                    for _ in range(cfg.pfedme[1]):
                        inner = problem.gradient(theta, i, batch) + cfg.pfedme[0] * (theta - x)
                        theta = theta - cfg.pfedme[2] * inner
                    g, theta_i[i] = cfg.pfedme[0] * (x - theta), theta
                if cfg.sam is not None:  # FedSAM, § 8
                    g = problem.gradient(x + to_length(g, at(cfg.sam, t)), i, batch)
                if cfg.fedsmoo is not None:  # FedSMOO, § 9
                    e = to_length(g - dual - s, at(cfg.fedsmoo, t))
                    dual = dual + e - s
                    g = problem.gradient(x + e, i, batch)
                if cfg.fedspeed is not None:  # FedSpeed, § 20 A
                    _, alpha, rho, normalised, _ = cfg.fedspeed
                    ascent = to_length(g, rho) if normalised else rho * g
                    g = (1 - alpha) * g + alpha * problem.gradient(x + ascent, i, batch)
                # (3) mixing: FedCM, § 7
                if cfg.alpha is not None:
                    g = at(cfg.alpha, t) * g + (1 - at(cfg.alpha, t)) * Delta
                # (4) corrections: FedProx, § 4; SCAFFOLD, § 5; FedDyn, § 6
                correction = zeros
                if cfg.mu is not None:
                    correction = correction + at(cfg.mu, t) * (x - w)
                if cfg.scaffold is not None:
                    correction = correction + c - c_i.get(i, zeros)
                if cfg.feddyn is not None:
                    correction = correction - lambda_i.get(i, zeros) + at(cfg.feddyn, t) * (x - w)
                if cfg.scaffnew is not None:
                    correction = correction - h_i[i]
                if cfg.fedspeed is not None:  # § 20 A
                    correction = correction - dual_i.get(i, zeros) + cfg.fedspeed[0] * (x - w)
                if "toga" in cfg.modern and modern is not None:
                    correction = correction + cfg.modern["toga"]["beta"] * modern.server["toga"]
                g = g + correction
                if "fixed_head" in cfg.modern and modern is not None:
                    rests = modern.head
                    g = np.where(rests, 0.0, g)
                if cfg.fedrep is not None:  # § 17: the head first, then the body
                    head, epochs, size = cfg.fedrep
                    rests = ~head if k < local_steps(schedule.sizes[i], size, epochs) else head
                    g = np.where(rests, 0.0, g)
                # (5) clipping
                if cfg.clip_norm is not None:
                    norm = float(np.linalg.norm(g))
                    if norm > cfg.clip_norm:
                        clipped += 1
                        g = g * (cfg.clip_norm / norm)
                # (6) SGD: weight decay, momentum
                rate = eta
                if modern is not None:
                    g, rate = modern.direction(g, i, k, state), eta * modern.rate(k, K[i])
                buffer = cfg.momentum * buffer + g + cfg.weight_decay * x
                x = np.where(rests, x, x - rate * buffer)
            x_K[i] = x
            if cfg.keep_momentum:
                momentum_i[i] = buffer

            # The end of the client's round; c_i and lambda_i of a part move only when it is
            # averaged.
            moved = np.divide(origin[i] - x, elapsed[i], out=np.zeros(D), where=elapsed[i] > 0)
            mean_velocity += moved / n  # § 7: - (x_{i,K} - o_i) / h_i, 0 where h_i = 0
            if cfg.scaffold is not None:  # § 5
                old = c_i.get(i, zeros)
                if cfg.scaffold == "displacement":
                    new = old - c + moved
                elif cfg.scaffold == "gradient":
                    new = problem.gradient(w, i, schedule.data[i] if len(schedule.data) else None)
                    new = new + cfg.weight_decay * w
                else:
                    raise ValueError(f"scaffold {cfg.scaffold!r}")
                new = np.where(averaged & (elapsed[i] > 0), new, old)
                kept_c = new - (old if cfg.scaffold_momentum is None else c)
                mean_c_change += np.where(averaged, kept_c, 0.0) / n
                c_i[i] = new
            if modern is not None:
                ends[i] = modern.finish(i, x, x_0[i], K[i], moved, state)
            if cfg.feddyn is not None:  # § 6
                old = lambda_i.get(i, zeros)
                lambda_i[i] = np.where(averaged, old - at(cfg.feddyn, t) * (x - w), old)
            if cfg.fedspeed is not None:  # § 20 A
                old = dual_i.get(i, zeros)
                dual_i[i] = np.where(averaged, old - cfg.fedspeed[0] * (x - w), old)
            if cfg.fedsmoo is not None:  # § 9
                mu_i[i] = dual
                U += (dual - e) / n
            # What is sent: x_{i,K} - w; under RI's second rule what moved; its largest entries
            # under top-k.
            u[i] = x - origin[i] if cfg.beta is not None and cfg.aggregate == "updates" else x - w
            if cfg.fedspeed is not None and cfg.fedspeed[4] == "participants":  # § 20 A
                u[i] = u[i] - dual_i[i] / cfg.fedspeed[0]
            if cfg.topk is not None:
                k = exact_ceil(cfg.topk, D)
                v = u[i] + e_i.get(i, zeros)
                largest = np.argsort(-np.abs(v), kind="stable")[:k]
                u[i] = zeros.copy()
                u[i][largest] = v[largest]
                e_i[i] = v - u[i]
                up[i] += k - D
            # § 20 F: its number travels where x_{i,K} itself does not
            if cfg.fedexp is not None:
                compressed = cfg.topk is not None or sender is not None
                up[i] += compressed or cfg.aggregate == "updates"
            if sender is not None:  # § 20 J
                u[i], numbers, bits = sender.send(u[i], t, i)
                up[i] += numbers - D
                up_bytes += 8 * (vectors_up - 1) * D + math.ceil(bits / 8)

        w = at_server
        new_w = w
        evaluated = history[-1].evaluated if history else w0
        if cohort:
            # What arrives, and robust rules (§ 18), on the coordinates averaged.
            U_n = np.array([np.where(averaged, u[i], 0.0) for i in cohort])
            if cfg.attack is not None:
                drawn = {} if cfg.noise is None else {i: cfg.noise(t, i, D) for i in cohort}
                U_n = robust.attacked(U_n, cohort, cfg.attackers, *cfg.attack, drawn)
                u = dict(zip(cohort, U_n, strict=True))
            # The aggregate. FedNova (Wang et al., 2020): every client's update per unit of its own
            # work.
            if cfg.fednova:
                rho = cfg.momentum
                tau = {i: sum((1 - rho**j) / (1 - rho) for j in range(1, K[i] + 1)) for i in cohort}
                d = sum(p[i] * tau[i] for i in cohort) * sum(
                    (p[i] * u[i] / tau[i] for i in cohort), zeros
                )
            elif cfg.robust is not None:
                d = robust.aggregate(U_n, **cfg.robust)
            else:
                d = sum((p[i] * u[i] for i in cohort), zeros)
            eta_g = 1.0
            if cfg.fedexp is not None:  # § 20 F
                spread = sum(p[i] * float(np.sum((x_K[i] - given) ** 2)) for i in cohort)
                eta_g = max(1.0, spread / (2 * (float(np.sum(d**2)) + cfg.fedexp[0])))
                d = eta_g * d
            if modern is not None:
                d = modern.update(d, n, p, ends)
            of_all = None if sender is None else sender.end_round(m)
            d = d if of_all is None else of_all
            if cfg.ifca is not None:  # § 20 H
                for j in set(chosen.values()):
                    mine = [i for i in cohort if chosen[i] == j]
                    share = sum(p[i] for i in mine)
                    centres[j] = sum((p[i] / share * x_K[i] for i in mine), zeros)
            # The methods' server rules; quantities of a part that is not averaged do not move.
            if cfg.scaffold is not None:
                share = n / m if cfg.scaffold_momentum is None else cfg.scaffold_momentum
                c = c + share * mean_c_change
            if cfg.feddyn is not None:
                a = at(cfg.feddyn, t)
                change = (a / m) * sum((x_K[i] - given for i in cohort), zeros)
                lam = np.where(averaged, lam - change, lam)
                d = d - lam / a
            if cfg.fedspeed is not None and cfg.fedspeed[4] == "all":  # § 20 A
                change = (cfg.fedspeed[0] / m) * sum((x_K[i] - given for i in cohort), zeros)
                dual_mean = np.where(averaged, dual_mean - change, dual_mean)
                d = d - dual_mean / cfg.fedspeed[0]
            if cfg.alpha is not None:
                Delta = np.where(averaged, mean_velocity, Delta)
            if cfg.fedsmoo is not None:
                s = to_length(U, at(cfg.fedsmoo, t))
            d = np.where(averaged, d, 0.0)
            lr = decayed(cfg.server[1], cfg.server_lr_decay, t)
            stepped, state = server_step(w, d, cfg.server, lr, optimizer)
            fresh = {"m": 0.0, "v": cfg.server[-1] ** 2}
            optimizer = {
                name: np.where(averaged, row, optimizer.get(name, np.full(D, fresh[name])))
                for name, row in state.items()
            }
            new_w = np.where(averaged, stepped, w)
            evaluated = np.where(averaged, new_w, sum((p[i] * x_K[i] for i in cohort), zeros))
            if cfg.fedexp is not None and cfg.fedexp[1] and t > 0:
                evaluated = (new_w + w) / 2
            # Averaging throws away all clients' copies of a part; participants wrote the others.
            for i in cohort:
                last_i[i] = x_K[i]
                valid[i] = np.ones(D, dtype=bool)
            valid = {i: kept & ~averaged for i, kept in valid.items()}

        previous = w
        metrics = {"divergence/update": float(np.sum((new_w - w) ** 2)), "client_lr": eta}
        everyone = [last_i.get(i, w0) for i in range(m)]
        metrics["divergence/all"] = float(np.mean([np.sum((x - evaluated) ** 2) for x in everyone]))
        if cfg.ifca is not None and cohort:
            for j in range(len(centres)):
                metrics[f"clusters/share_{j}"] = sum(p[i] for i in cohort if chosen[i] == j)
        if cfg.fedexp is not None and cohort:
            metrics["fedexp/rate"] = eta_g
        if cohort:
            centre = sum(x_K.values(), zeros) / n
            metrics["divergence/participants"] = float(
                np.mean([np.sum((x - evaluated) ** 2) for x in x_K.values()])
            )
            metrics["consensus/total"] = float(
                np.mean([np.sum((x - centre) ** 2) for x in x_K.values()])
            )
        sent["down"] += sum(down.values())
        sent["up"] += sum(up.values())
        for way, count in (*sent.items(), ("total", sum(sent.values()))):
            metrics[f"communication/{way}_parameters"] = count
        if sender is not None:
            metrics["communication/up_bytes"] = up_bytes
        if cfg.broadcast is not None:
            metrics["communication/down_bytes"] = down_bytes
        if sender is not None and not cfg.parts:
            metrics["communication/total_bytes"] = up_bytes + down_bytes
        w = new_w
        rows = {
            "c_i": c_i,
            "lambda_i": lambda_i,
            "mu_i": mu_i,
            "e_i": e_i,
            "momentum_i": momentum_i,
        }
        rows |= {
            "v_i": v_i,
            "theta_i": theta_i,
            "o_i": o_i,
            "dual_i": dual_i,
            "h_i": h_i,
            "last_i": last_i,
            "origin": origin,
            "elapsed": elapsed,
        }
        if sender is not None:
            rows |= {"error": sender.error, "h": sender.h, "q": sender.q}
        # rows are replaced, never changed
        if modern is not None:
            rows |= modern.clients
            metrics = {}  # what travels with its components is not counted here
        clients = {name: dict(table) for name, table in rows.items()}
        server = {"c": c, "lambda": lam, "s": s, "Delta": Delta, "dual": dual_mean} | optimizer
        server["centres"] = centres.copy()
        server |= {} if sender is None else {"H": sender.mean}
        if modern is not None:
            own = {name: np.array(value) for name, value in modern.server.items()}
            server = own | {name: server[name] for name in ("c", "lambda")}
            if "wmsam" in cfg.modern:
                server["c"] = own["c"]
        history.append(Round(w, evaluated, clients, server, x_K, x_0, clipped, down, up, metrics))
    for i in range(m) if modern is not None else ():
        history[-1].personal[i] = modern.personal(i, w)
    return history
