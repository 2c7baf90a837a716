"""The methods and compositions that the oracle knows, and the callbacks and optimizers of ours that
they stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fl_lightning import callbacks as c
from fl_lightning.optim import FedAdagrad, FedAdam, FedYogi
from fl_lightning.sampling import generator
from fl_lightning.schedules import Schedule
from tests.helpers.federation import BATCH
from tests.oracles.oracle import Config

CLIP = 0.9
ADAPTIVE = {"adam": FedAdam, "yogi": FedYogi}
PATTERNS = {"net.0.*": slice(0, 16), "net.2.weight": slice(16, 28), "net.2.bias": slice(28, 31)}


class Function(Schedule):
    """A function of the round as a schedule of ours."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, round: int) -> float:
        return float(self.function(round))


def methods(config: Config) -> list[Any]:
    """The callbacks that a configuration of the oracle stands for."""
    given: dict[str, Any] = {n: Function(v) if callable(v) else v for n, v in vars(config).items()}
    made: list[Any] = [c.DivergenceLogger(), c.CommunicationLogger(), c.ConsensusDistanceLogger()]
    if config.beta is not None:
        made.append(c.RelaxedInitialization(given["beta"], given["aggregate"], config.offset))
    if config.scaffold is not None:
        made.append(c.ControlVariates(given["scaffold"], config.scaffold_momentum))
    if config.sam is not None:
        made.append(c.SharpnessAwareMinimization(given["sam"]))
    if config.mu is not None:
        made.append(c.ProximalTerm(given["mu"]))
    if config.feddyn is not None:
        made.append(c.DynamicRegularization(given["feddyn"]))
    if config.alpha is not None:
        made.append(c.ClientMomentum(given["alpha"]))
    if config.fedsmoo is not None:
        made.append(c.GlobalSharpnessAwareMinimization(given["fedsmoo"]))
    if config.ifca is not None:
        made.append(c.ClusteredModels(*config.ifca))
    if config.scaffnew is not None:
        made.append(c.RandomSkips(config.scaffnew))
    if config.fedspeed is not None:
        made.append(c.MixedAscent(*config.fedspeed))
    if config.lesam is not None:
        made.append(c.LocallyEstimatedPerturbation(given["lesam"], config.lesam_source))
    if config.fedexp is not None:
        made.append(c.ExtrapolatedStep(*config.fedexp))
    if config.fednova:
        made.append(c.NormalizedAveraging())
    if config.topk is not None:
        made.append(c.TopKCompression(config.topk))
    if config.compression is not None:
        made.append(compressor(config.compression))
    if config.broadcast is not None:
        made.append(c.QuantizedBroadcast(config.broadcast))
    if config.ditto is not None:
        made.append(c.ProximalPersonalModel(given["ditto"]))
    if config.moon is not None:
        made.append(c.ModelContrast(given_or(config.moon[0]), config.moon[1]))
    if config.fedntd is not None:
        made.append(c.NotTrueDistillation(given_or(config.fedntd[0]), config.fedntd[1]))
    if config.fedlc is not None:
        made.append(c.LogitCalibration(given_or(config.fedlc[0]), config.fedlc[1]))
    if config.pfedme is not None:
        made.append(c.MoreauEnvelope(*config.pfedme))
    if config.fedrep is not None:
        made.insert(0, c.AlternatingHead(config.fedrep[1]))  # before what corrects
    if config.robust is not None:
        made.append(c.RobustAggregation(**config.robust))
    if config.attack is not None:
        made.append(c.ByzantineClients(config.attack[0], 0.4, config.attack[1]))
    made += [MADE[name](value) for name, value in config.modern.items()]
    if config.parts:
        periods = {pattern: period_of(config, where) for pattern, where in PATTERNS.items()}
        made.append(c.PartialAveraging(periods=periods))
    return made


def muon(given: dict[str, Any]) -> Any:
    """The oracle excludes tensors by their places."""
    names = ["net.0.weight", "net.0.bias", "net.2.weight", "net.2.bias"]
    excluded = [names[place] for place in given.get("exclude", ())]
    return c.MuonDirection(**{**given, "exclude": excluded})


# What the components of the oracle's modern.py stand for.
MADE: dict[str, Any] = {
    "adam": lambda given: c.AdamDirection(**given),
    "muon": muon,
    "direction": lambda given: c.GlobalDirection(*given),
    "decay": c.DecayWithinRound,
    "lookahead": c.LookaheadMomentum,
    "ascent": c.ServerAscent,
    "toga": lambda given: c.GlobalUpdateGuidance(**given),
    "wmsam": lambda given: c.MomentumGuidedPerturbation(**given),
    "mixed": lambda given: c.MixedPersonalModel(*given),
    "ala": lambda given: c.AdaptiveLocalAggregation("last", *given),
    "meta": lambda given: c.MetaGradient(*given),
    "rod": c.PersonalHead,
    "proto": lambda strength: c.PrototypePull(3, 4, strength),
    "fair": c.FairAggregation,
    "fixed_head": lambda given: c.FixedHead(),
}


def given_or(value: Any) -> Any:
    return Function(value) if callable(value) else value


def compressor(rule: dict[str, Any]) -> Any:
    """The callback that a rule of the oracle stands for."""
    given = {key: value for key, value in rule.items() if key != "kind"}
    if rule["kind"] == "ef21":
        inner = given.pop("compressor")
        return c.ErrorFeedback21(None if inner is None else compressor(inner), **given)
    made = {
        "quantised": c.QuantizedUpdate,
        "sign": c.SignUpdate,
        "randk": c.RandomK,
        "topk": c.TopKCompression,
        "powersgd": c.LowRankUpdate,
    }
    return made[rule["kind"]](**given)


def part(*patterns: str) -> Any:
    """The oracle's mask of the parameters that our patterns name."""
    mask = np.zeros(31, dtype=bool)
    for pattern in patterns:
        mask[PATTERNS[pattern]] = True
    return mask


def period_of(config: Config, where: slice) -> Any:
    mine = [period for mask, period in config.parts if mask[where].all()]
    return 1 if not mine else "never" if mine[0] is None else mine[0]


def server(config: Config) -> Any:
    """The server optimizer that a rule of the oracle stands for."""
    kind, lr, *rest = config.server
    if kind == "sgd":
        return lambda w: torch.optim.SGD(w, lr)
    if kind == "sgdm":
        return lambda w: torch.optim.SGD(w, lr, momentum=rest[0])
    if kind == "adagrad":
        return lambda w: FedAdagrad(w, lr, beta1=rest[0], tau=rest[2])
    return lambda w: ADAPTIVE[kind](w, lr, betas=(rest[0], rest[1]), tau=rest[2])


def settings(weighting: str, **components: Any) -> Config:
    """Components of the oracle with what all runs here share."""
    return Config(
        lr=0.3, lr_decay=0.9, weight_decay=0.01, clip_norm=CLIP, weighting=weighting, **components
    )


HEAD = part("net.2.weight", "net.2.bias")
ORDER = tuple(generator(1, "ifca").permutation(8).tolist())  # of the runs' eight clients
ALS = [(part("net.0.*"), 3)]
QSGD: dict[str, Any] = {"kind": "quantised", "levels": 127, "norm": "l2", "per_layer": True}
SIGN = {"kind": "sign", "per_layer": True}
RANDK: dict[str, Any] = {"kind": "randk", "fraction": 0.3, "memory": True}
TOPK = {"kind": "topk", "fraction": 0.2}
POWERSGD = {"kind": "powersgd", "rank": 1}
# The rules of compression, each alone and beside what moves starts, corrects, perturbs, uploads.
COMPRESSED: dict[str, dict[str, Any]] = {
    "QSGD": {"compression": QSGD},
    "QSGD, one level, whole": {"compression": {**QSGD, "levels": 1, "per_layer": False}},
    "QSGD, max, three levels": {"compression": {**QSGD, "levels": 3, "norm": "max"}},
    "QSGD + SCAFFOLD + FedSAM": {"compression": QSGD, "scaffold": "displacement", "sam": 0.05},
    "EF-signSGD": {"compression": SIGN},
    "EF-signSGD, whole, + RI": {"compression": {**SIGN, "per_layer": False}, "beta": 0.1},
    "rand-k": {"compression": {**RANDK, "memory": False}},
    "rand-k, memory, + FedSAM": {"compression": RANDK, "sam": 0.05},
    "PowerSGD": {"compression": POWERSGD},
    "QSGD, both ways": {"compression": QSGD, "broadcast": 127},
    "quantised broadcast + FedProx + RI": {"broadcast": 3, "mu": 0.1, "beta": 0.1},
    "quantised broadcast + SCAFFOLD": {"broadcast": 127, "scaffold": "gradient"},
    "PowerSGD + RI + FedAdam": {
        "compression": POWERSGD,
        "beta": 0.1,
        "server": ("adam", 0.1, 0.9, 0.99, 1e-3),
    },
}
for average in ("participants", "all"):
    for name, inner in {"top-k": TOPK, "signs": SIGN, "rand-k": RANDK, "identity": None}.items():
        COMPRESSED[f"EF21, {name}, {average}"] = {
            "compression": {"kind": "ef21", "compressor": inner, "average": average}
        }
METHODS: dict[str, dict[str, Any]] = {
    **COMPRESSED,
    "FedAvg": {},
    "FedInit": {"beta": 0.1},
    "FedInit, updates": {"beta": 0.1, "aggregate": "updates"},
    "FedInit, mean": {"beta": 0.1, "offset": "mean"},
    "FedInit, centred": {"beta": 0.1, "offset": "centred"},
    "FedInit, mean, updates": {"beta": 0.1, "offset": "mean", "aggregate": "updates"},
    "FedCM + RI, centred": {"alpha": 0.1, "beta": 0.1, "offset": "centred"},
    "SCAFFOLD": {"scaffold": "displacement"},
    "SCAFFOLD, gradient": {"scaffold": "gradient"},
    "SCAFFOLD + RI": {"scaffold": "displacement", "beta": 0.1},
    "FedSAM": {"sam": 0.05},
    "FedGamma": {"sam": 0.05, "scaffold": "displacement"},
    "FedGamma + RI": {"sam": 0.05, "scaffold": "displacement", "beta": 0.1},
    "SCAFFOLD, gradient + RI": {"scaffold": "gradient", "beta": 0.1},
    "SCAFFOLD + RI, updates": {"scaffold": "displacement", "beta": 0.1, "aggregate": "updates"},
    "FedAvgM": {"server": ("sgdm", 0.7, 0.9)},
    "FedProx": {"mu": 0.1},
    "FedProx + RI": {"mu": 0.1, "beta": 0.1},
    "FedAdam": {"server": ("adam", 0.1, 0.9, 0.99, 1e-3)},
    "FedAdam + RI": {"server": ("adam", 0.1, 0.9, 0.99, 1e-3), "beta": 0.1},
    "FedYogi": {"server": ("yogi", 0.1, 0.9, 0.99, 1e-3)},
    "FedAdagrad": {"server": ("adagrad", 0.1, 0.0, 0.0, 1e-3)},
    "FedAdagrad with momentum + RI": {"server": ("adagrad", 0.1, 0.9, 0.0, 1e-3), "beta": 0.1},
    "FedDyn": {"feddyn": 0.1},
    "FedDyn + RI": {"feddyn": 0.1, "beta": 0.1},
    "FedDyn + RI, updates": {"feddyn": 0.1, "beta": 0.1, "aggregate": "updates"},
    "FedCM": {"alpha": 0.1},
    "FedCM + RI": {"alpha": 0.1, "beta": 0.1},
    "FedCM + RI, updates": {"alpha": 0.1, "beta": 0.1, "aggregate": "updates"},
    "MoFedSAM": {"alpha": 0.1, "sam": 0.05},
    "FedSMOO": {"feddyn": 0.1, "fedsmoo": 0.1},
    "FedSMOO + RI": {"feddyn": 0.1, "fedsmoo": 0.1, "beta": 0.1},
    "FedSMOO's perturbation alone": {"fedsmoo": 0.1},
    "FedNova": {"fednova": True},
    "FedNova + RI": {"fednova": True, "beta": 0.1},
    "FedNova, momentum": {"fednova": True, "momentum": 0.9},
    "top-k": {"topk": 0.1},
    "top-k + RI": {"topk": 0.1, "beta": 0.1},
    "all that mix": {
        "mu": 0.05,
        "scaffold": "displacement",
        "feddyn": 0.1,
        "alpha": 0.3,
        "sam": 0.05,
        "beta": -0.1,
    },
    "median": {"robust": {"rule": "median"}},
    "trimmed mean": {"robust": {"rule": "trimmed_mean", "trim": 0.34}},
    "Krum": {"robust": {"rule": "krum", "byzantine": 0}},
    "multi-Krum": {"robust": {"rule": "multi_krum", "byzantine": 0, "keep": 2}},
    "geometric median": {"robust": {"rule": "geometric_median"}},
    "mixing + Krum": {"robust": {"rule": "krum", "byzantine": 0, "mixing": True}},
    "median + SCAFFOLD + RI": {
        "robust": {"rule": "median"},
        "scaffold": "displacement",
        "beta": 0.1,
    },
    "Krum + FedALS": {"robust": {"rule": "krum", "byzantine": 0}, "parts": ALS},
    "flipped signs": {"attack": ("sign_flip", 0.5)},
    "flipped signs + FedAdam": {
        "attack": ("sign_flip", None),
        "server": ("adam", 0.1, 0.9, 0.99, 1e-3),
    },
    "noise + median": {"attack": ("noise", 0.1), "robust": {"rule": "median"}},
    "flipped labels": {"attack": ("label_flip", None)},
    "alie": {"attack": ("alie", None)},
    "alie + geometric median": {"attack": ("alie", 1.5), "robust": {"rule": "geometric_median"}},
    "FedSpeed": {"fedspeed": (0.1, 1.0, 0.1, True, "all")},
    "FedSpeed, mixed, + SCAFFOLD": {
        "fedspeed": (0.2, 0.75, 0.1, True, "all"),
        "scaffold": "displacement",
    },
    "FedSpeed + EF-signSGD": {"fedspeed": (0.2, 1.0, 0.05, True, "all"), "compression": SIGN},
    "FedSpeed as printed": {"fedspeed": (0.1, 0.5, 0.1, False, "participants")},
    "FedSpeed as printed + RI": {"fedspeed": (0.3, 0.875, 0.1, True, "participants"), "beta": 0.1},
    "FedALS + FedSpeed": {"parts": ALS, "fedspeed": (0.1, 0.5, 0.1, True, "all")},
    "FedLESAM": {"lesam": 0.1},
    "FedLESAM, last": {"lesam": 0.1, "lesam_source": "last"},
    "FedLESAM-S": {"lesam": 0.1, "scaffold": "displacement"},
    "FedLESAM-D + RI": {"lesam": 0.1, "feddyn": 0.1, "beta": 0.1},
    "FedLESAM, schedule, + FedCM + FedProx": {"lesam": lambda t: 0.1 * t, "alpha": 0.3, "mu": 0.1},
    "FedDC": {"scaffold": "displacement", "feddyn": 0.01},
    "FedExP": {"fedexp": (1e-3, True)},
    "FedExP, w, + SAM + RI": {"fedexp": (1e-4, False), "sam": 0.05, "beta": 0.1},
    "FedExP + top-k": {"fedexp": (1e-3, True), "topk": 0.3},
    "FedExP + RI, updates + FedDyn": {
        "fedexp": (1e-3, True),
        "beta": 0.1,
        "aggregate": "updates",
        "feddyn": 0.1,
        "server": ("sgd", 0.5),
    },
    "IFCA": {"ifca": (2, 1), "ifca_order": ORDER},
    "IFCA, three, + SCAFFOLD + SAM": {
        "ifca": (3, 2),
        "ifca_order": ORDER,
        "scaffold": "displacement",
        "sam": 0.05,
    },
    "FedALS": {"parts": ALS},
    "FedALS, three periods": {"parts": [(part("net.0.*"), 2), (part("net.2.bias"), 3)]},
    "FedPer": {"parts": [(part("net.2.weight", "net.2.bias"), None)]},
    "every client alone": {"parts": [(part("net.0.*", "net.2.weight", "net.2.bias"), None)]},
    "FedRep": {"fedrep": (HEAD, 1, BATCH)},
    "FedRep, half an epoch, momentum": {"fedrep": (HEAD, 0.5, BATCH), "momentum": 0.9},
    "FedRep + SCAFFOLD + FedProx": {
        "fedrep": (HEAD, 1, BATCH),
        "scaffold": "displacement",
        "mu": 0.1,
    },
    "FedRep + FedCM": {"fedrep": (HEAD, 1, BATCH), "alpha": 0.3},
    "Ditto": {"ditto": 0.1},
    "Ditto, momentum": {"ditto": 2.0, "momentum": 0.9},
    "Ditto, schedule, + SCAFFOLD + RI": {
        "ditto": lambda t: 0.5 * t,
        "scaffold": "displacement",
        "beta": 0.1,
    },
    "pFedMe": {"pfedme": (15.0, 5, 0.05)},
    "pFedMe, server rate 2": {"pfedme": (2.0, 3, 0.1), "server": ("sgd", 2.0)},
    "pFedMe + SCAFFOLD": {"pfedme": (15.0, 2, 0.05), "scaffold": "displacement"},
    "MOON": {"moon": (1.0, 0.5)},
    "MOON + FedSAM + RI": {"moon": (5.0, 0.2), "sam": 0.05, "beta": 0.1},
    "MOON + SCAFFOLD, gradient": {"moon": (2.0, 0.5), "scaffold": "gradient"},
    "MOON + FedALS": {"moon": (2.0, 0.5), "parts": ALS},
    "FedNTD": {"fedntd": (1.0, 1.0)},
    "FedNTD, temperature": {"fedntd": (2.0, 3.0)},
    "FedNTD + FedSAM + RI": {"fedntd": (1.0, 2.0), "sam": 0.05, "beta": 0.1},
    "FedNTD + Ditto": {"fedntd": (1.0, 2.0), "ditto": 0.5},
    "FedLC": {"fedlc": (1.0, False)},
    "FedLC, printed": {"fedlc": (0.5, True)},
    "FedLC + FedSAM + RI": {"fedlc": (1.0, False), "sam": 0.05, "beta": 0.1},
    "FedLC + flipped labels": {"fedlc": (1.0, False), "attack": ("label_flip", None)},
    "MOON + FedNTD + FedLC": {
        "moon": (lambda t: 0.5 * t, 0.5),
        "fedntd": (1.0, 2.0),
        "fedlc": (0.5, False),
        "scaffold": "displacement",
        "sam": 0.05,
        "beta": 0.1,
    },
    "FedALS, momentum kept": {"parts": ALS, "momentum": 0.9, "keep_momentum": True},
    "FedALS + SCAFFOLD, gradient": {"parts": ALS, "scaffold": "gradient"},
    "FedALS + SCAFFOLD + RI": {"parts": ALS, "scaffold": "displacement", "beta": 0.1},
    "FedALS + RI, updates": {"parts": ALS, "beta": 0.1, "aggregate": "updates"},
    "FedALS + FedCM + RI, updates": {
        "parts": ALS,
        "alpha": 0.1,
        "beta": 0.1,
        "aggregate": "updates",
    },
    "FedALS + FedDyn + RI": {"parts": ALS, "feddyn": 0.1, "beta": 0.1},
    "FedALS + FedAdam": {"parts": ALS, "server": ("adam", 0.1, 0.9, 0.99, 1e-3)},
    "FedALS + FedAvgM": {"parts": ALS, "server": ("sgdm", 0.7, 0.9)},
    "schedules": {
        "mu": lambda t: 0.1 / (t + 1),
        "beta": lambda t: 0.1 * (-1) ** t,
        "feddyn": lambda t: 0.1 + 0.1 * t,
    },
}
# ε is large enough that its derivative is moderate.
ADAM: dict[str, Any] = {"adam": {"epsilon": 1e-3}}
SECOND: dict[str, Any] = {"adam": {"epsilon": 1e-3, "second": "averaged"}}
BOTH: dict[str, Any] = {"adam": {"epsilon": 1e-3, "first": "averaged", "second": "averaged"}}
FULL: dict[str, Any] = {"adam": {"epsilon": 1e-3, "second": "averaged", "share": "full"}}
ADD, MIX = {"direction": (0.5, "add")}, {"direction": (0.5, "mix")}
LMO: dict[str, Any] = {
    "momentum": 0.3,
    "nesterov": False,
    "start": "own",
    "variates": True,
    "average": "all",
    "vectors": "unit",
    "orthogonaliser": "svd",
    "adjust": "none",
}
AVERAGED = {"momentum": 0.8, "start": "averaged"}
TOGA = {"toga": {"radius": 0.05, "kappa": 2.0, "beta": 0.9}}
GUIDED = {"radius": 0.05, "alpha": 0.3, "rate": 0.4, "lower": 0.2, "upper": 0.8}
SCAFFOLD: dict[str, Any] = {"scaffold": "displacement"}
# The first layer is averaged every third round, the last bias never.
PARTS: dict[str, Any] = {"parts": [(part("net.0.*"), 3), (part("net.2.bias"), None)]}
# The methods of 2023 to 2026, each alone and beside others.
MODERN: dict[str, dict[str, Any]] = {
    "FedSWA": {"modern": {"decay": 0.1}},
    "FedSWA, rising, + FedProx + RI": {"modern": {"decay": 1.5}, "mu": 0.1, "beta": 0.1},
    "FedMoSWA": {"modern": {"decay": 0.1}, **SCAFFOLD, "scaffold_momentum": 0.4},
    "SCAFFOLD with momentum + SAM": {**SCAFFOLD, "scaffold_momentum": 0.4, "sam": 0.05},
    "FedSWA + SCAFFOLD + RI": {"modern": {"decay": 0.3}, **SCAFFOLD, "beta": 0.1},
    "Local AdamW": {"modern": ADAM},
    "averaged AdamW": {"modern": BOTH},
    "averaged AdamW, tensors, betas": {
        "modern": {"adam": {**BOTH["adam"], "share": "tensor", "betas": (0.8, 0.9)}}
    },
    # A smaller ε makes rounding larger by each step.
    "averaged first": {"modern": {"adam": {"epsilon": 0.1, "first": "averaged"}}},
    "FedAdamW": {"modern": {**SECOND, **ADD}},
    "FedAdamW + SAM + SCAFFOLD + RI": {
        "modern": {**SECOND, **ADD},
        **SCAFFOLD,
        "sam": 0.05,
        "beta": 0.1,
    },
    "FedLADA": {"modern": {**FULL, "direction": (0.9, "mix")}},
    "FedLADA + decay": {"modern": {**FULL, "direction": (0.9, "mix"), "decay": 0.1}},
    "global direction alone": {"modern": ADD},
    "Local Muon": {"modern": {"muon": {}}},
    "Local Muon, svd, rms, excluded": {
        "modern": {"muon": {"orthogonaliser": "svd", "adjust": "match_rms_adamw", "exclude": (2,)}}
    },
    "Local Muon, unit, + SAM": {
        "modern": {"muon": {"vectors": "unit", "nesterov": False}},
        "sam": 0.05,
    },
    "FedMuon": {"modern": {"muon": {**AVERAGED, "matrix_lr_scale": 2.0}, **MIX}},
    "FedMuon + SCAFFOLD + RI": {"modern": {"muon": AVERAGED, **MIX}, **SCAFFOLD, "beta": 0.1},
    "own Muon": {"modern": {"muon": {"start": "own"}}},
    "FedMuon-LMO": {"modern": {"muon": LMO}},
    "FedACG": {"modern": {"lookahead": 0.6}, "mu": 0.1},
    "FedNSAM": {"modern": {"lookahead": 0.6}, "sam": 0.05},
    "FedACG + RI + SCAFFOLD": {"modern": {"lookahead": 0.6}, "mu": 0.1, "beta": 0.1, **SCAFFOLD},
    "FedWMSAM": {"modern": {"wmsam": GUIDED}},
    "FedWMSAM, fixed, + RI": {"modern": {"wmsam": {**GUIDED, "rate": 0.0}}, "beta": 0.1},
    "FedGloSS": {"modern": {"ascent": 0.1}, "feddyn": 0.1, "sam": 0.05},
    "FedGloSS alone + RI": {"modern": {"ascent": 0.1}, "beta": 0.1},
    "FedTOGA": {"modern": TOGA, "feddyn": 0.1},
    "FedTOGA alone + RI": {"modern": TOGA, "beta": 0.1},
    "APFL": {"modern": {"mixed": (0.4, True)}},
    "APFL, fixed, + SAM + RI": {"modern": {"mixed": (0.7, False)}, "sam": 0.05, "beta": 0.1},
    "FedALA": {"modern": {"ala": (2.0, 3)}},
    "FedALA + SCAFFOLD": {"modern": {"ala": (2.0, 3)}, **SCAFFOLD},
    "FedBABU": {"modern": {"fixed_head": True}},
    "FedBABU + FedAdamW's directions": {"modern": {"fixed_head": True, **ADAM, **ADD}},
    "FedProto": {"modern": {"proto": 0.7}},
    "FedRoD": {"modern": {"rod": 1.0}},
    "FedRoD, plain, + SCAFFOLD": {"modern": {"rod": 0.0}, **SCAFFOLD},
    "Per-FedAvg": {"modern": {"meta": (0.1, "none", 1e-2)}},
    "Per-FedAvg, Hessian-free, + FedProx": {"modern": {"meta": (0.1, "free", 1e-2)}, "mu": 0.1},
    "q-FedAvg": {"modern": {"fair": 0.5}},
    "q-FedAvg, 2, + SAM": {"modern": {"fair": 2.0}, "sam": 0.05},
    "Local AdamW + FedALS": {"modern": ADAM, **PARTS},
    "Local Muon + FedALS + RI": {"modern": {"muon": {}}, **PARTS, "beta": 0.1},
    "global direction + FedALS": {"modern": ADD, **PARTS},
    "mixed direction + FedALS + SAM": {"modern": {"direction": (0.7, "mix")}, **PARTS, "sam": 0.05},
    "FedSWA + SCAFFOLD + FedALS": {"modern": {"decay": 0.3}, **SCAFFOLD, **PARTS},
    "FedMoSWA + FedALS": {"modern": {"decay": 0.1}, **SCAFFOLD, "scaffold_momentum": 0.4, **PARTS},
    "Local AdamW + FedDyn + FedALS": {"modern": ADAM, "feddyn": 0.1, **PARTS},
}
