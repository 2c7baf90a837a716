"""Methods and loggers of a federated run, one per file; import them from
``fl_lightning.callbacks``.
"""

if __name__ == "callbacks":
    raise ImportError("this is fl_lightning.callbacks: import it by that name")

from fl_lightning.callbacks.adam_direction import AdamDirection
from fl_lightning.callbacks.adaptive_local_aggregation import AdaptiveLocalAggregation
from fl_lightning.callbacks.alternating_head import AlternatingHead
from fl_lightning.callbacks.byzantine_clients import ByzantineClients
from fl_lightning.callbacks.client_momentum import ClientMomentum
from fl_lightning.callbacks.clustered_models import ClusteredModels
from fl_lightning.callbacks.communication_logger import CommunicationLogger
from fl_lightning.callbacks.consensus_distance_logger import ConsensusDistanceLogger
from fl_lightning.callbacks.control_variates import ControlVariates
from fl_lightning.callbacks.corrected_factor import CorrectedFactor
from fl_lightning.callbacks.decay_within_round import DecayWithinRound
from fl_lightning.callbacks.differential_privacy import DifferentialPrivacy
from fl_lightning.callbacks.divergence_logger import DivergenceLogger
from fl_lightning.callbacks.drift_logger import DriftLogger
from fl_lightning.callbacks.dynamic_regularization import DynamicRegularization
from fl_lightning.callbacks.error_feedback_21 import ErrorFeedback21
from fl_lightning.callbacks.exact_match import ExactMatch
from fl_lightning.callbacks.extrapolated_step import ExtrapolatedStep
from fl_lightning.callbacks.factor_schedule import FactorSchedule
from fl_lightning.callbacks.fair_aggregation import FairAggregation
from fl_lightning.callbacks.fixed_head import FixedHead
from fl_lightning.callbacks.global_direction import GlobalDirection
from fl_lightning.callbacks.global_loss_logger import GlobalLossLogger
from fl_lightning.callbacks.global_sharpness_aware_minimization import (
    GlobalSharpnessAwareMinimization,
)
from fl_lightning.callbacks.global_update_guidance import GlobalUpdateGuidance
from fl_lightning.callbacks.hessian_logger import HessianLogger
from fl_lightning.callbacks.locally_estimated_perturbation import LocallyEstimatedPerturbation
from fl_lightning.callbacks.logit_calibration import LogitCalibration
from fl_lightning.callbacks.lookahead_momentum import LookaheadMomentum
from fl_lightning.callbacks.low_rank_update import LowRankUpdate
from fl_lightning.callbacks.meta_gradient import MetaGradient
from fl_lightning.callbacks.mixed_ascent import MixedAscent
from fl_lightning.callbacks.mixed_personal_model import MixedPersonalModel
from fl_lightning.callbacks.model_contrast import ModelContrast
from fl_lightning.callbacks.momentum_guided_perturbation import MomentumGuidedPerturbation
from fl_lightning.callbacks.moreau_envelope import MoreauEnvelope
from fl_lightning.callbacks.multiple_choice import MultipleChoice
from fl_lightning.callbacks.muon_direction import MuonDirection
from fl_lightning.callbacks.normalized_averaging import NormalizedAveraging
from fl_lightning.callbacks.not_true_distillation import NotTrueDistillation
from fl_lightning.callbacks.padded_ranks import PaddedRanks
from fl_lightning.callbacks.partial_averaging import PartialAveraging
from fl_lightning.callbacks.per_client_evaluation import PerClientEvaluation
from fl_lightning.callbacks.personal_head import PersonalHead
from fl_lightning.callbacks.power_of_choice import PowerOfChoice
from fl_lightning.callbacks.progress_bar import FederatedProgressBar
from fl_lightning.callbacks.prototype_pull import PrototypePull
from fl_lightning.callbacks.proximal_personal_model import ProximalPersonalModel
from fl_lightning.callbacks.proximal_term import ProximalTerm
from fl_lightning.callbacks.quantized_broadcast import QuantizedBroadcast
from fl_lightning.callbacks.quantized_update import QuantizedUpdate
from fl_lightning.callbacks.random_epochs import RandomEpochs
from fl_lightning.callbacks.random_k import RandomK
from fl_lightning.callbacks.random_skips import RandomSkips
from fl_lightning.callbacks.relaxed_initialization import RelaxedInitialization
from fl_lightning.callbacks.residual_merge import ResidualMerge
from fl_lightning.callbacks.robust_aggregation import RobustAggregation
from fl_lightning.callbacks.run_card import RunCard
from fl_lightning.callbacks.server_ascent import ServerAscent
from fl_lightning.callbacks.sharpness_aware_minimization import SharpnessAwareMinimization
from fl_lightning.callbacks.sign_update import SignUpdate
from fl_lightning.callbacks.stacked_adapters import StackedAdapters
from fl_lightning.callbacks.top_k_compression import TopKCompression
from fl_lightning.callbacks.truncated_product import TruncatedProduct

__all__ = [
    "AdamDirection",
    "AdaptiveLocalAggregation",
    "AlternatingHead",
    "ByzantineClients",
    "ClientMomentum",
    "ClusteredModels",
    "CommunicationLogger",
    "ConsensusDistanceLogger",
    "ControlVariates",
    "CorrectedFactor",
    "DecayWithinRound",
    "DifferentialPrivacy",
    "DivergenceLogger",
    "DriftLogger",
    "DynamicRegularization",
    "ErrorFeedback21",
    "ExactMatch",
    "ExtrapolatedStep",
    "FactorSchedule",
    "FairAggregation",
    "FederatedProgressBar",
    "FixedHead",
    "GlobalDirection",
    "GlobalLossLogger",
    "GlobalSharpnessAwareMinimization",
    "GlobalUpdateGuidance",
    "HessianLogger",
    "LocallyEstimatedPerturbation",
    "LogitCalibration",
    "LookaheadMomentum",
    "LowRankUpdate",
    "MetaGradient",
    "MixedAscent",
    "MixedPersonalModel",
    "ModelContrast",
    "MomentumGuidedPerturbation",
    "MoreauEnvelope",
    "MultipleChoice",
    "MuonDirection",
    "NormalizedAveraging",
    "NotTrueDistillation",
    "PaddedRanks",
    "PartialAveraging",
    "PerClientEvaluation",
    "PersonalHead",
    "PowerOfChoice",
    "PrototypePull",
    "ProximalPersonalModel",
    "ProximalTerm",
    "QuantizedBroadcast",
    "QuantizedUpdate",
    "RandomEpochs",
    "RandomK",
    "RandomSkips",
    "RelaxedInitialization",
    "ResidualMerge",
    "RobustAggregation",
    "RunCard",
    "ServerAscent",
    "SharpnessAwareMinimization",
    "SignUpdate",
    "StackedAdapters",
    "TopKCompression",
    "TruncatedProduct",
]
