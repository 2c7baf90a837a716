"""Methods and loggers of a federated run, one per file, in a folder per kind.

Import them from here: ``from fl_lightning.callbacks import ControlVariates``.
"""

if __name__ == "callbacks":
    raise ImportError("this is fl_lightning.callbacks: import it by that name")

from fl_lightning.callbacks.adapters.corrected_factor import CorrectedFactor
from fl_lightning.callbacks.adapters.factor_schedule import FactorSchedule
from fl_lightning.callbacks.adapters.orthogonal_factor import OrthogonalFactor
from fl_lightning.callbacks.adapters.padded_ranks import PaddedRanks
from fl_lightning.callbacks.adapters.residual_merge import ResidualMerge
from fl_lightning.callbacks.adapters.scaled_heads import ScaledHeads
from fl_lightning.callbacks.adapters.stacked_adapters import StackedAdapters
from fl_lightning.callbacks.adapters.truncated_product import TruncatedProduct
from fl_lightning.callbacks.decentralised.gossip import Gossip
from fl_lightning.callbacks.decentralised.gradient_tracking import GradientTracking
from fl_lightning.callbacks.decentralised.push_sum import PushSum
from fl_lightning.callbacks.directions.adam_direction import AdamDirection
from fl_lightning.callbacks.directions.global_direction import GlobalDirection
from fl_lightning.callbacks.directions.muon_direction import MuonDirection
from fl_lightning.callbacks.directions.soap_direction import SoapDirection
from fl_lightning.callbacks.drift.aligned_duals import AlignedDuals
from fl_lightning.callbacks.drift.augmented_models import AugmentedModels
from fl_lightning.callbacks.drift.client_momentum import ClientMomentum
from fl_lightning.callbacks.drift.control_variates import ControlVariates
from fl_lightning.callbacks.drift.decay_within_round import DecayWithinRound
from fl_lightning.callbacks.drift.displacement_duals import DisplacementDuals
from fl_lightning.callbacks.drift.dynamic_regularization import DynamicRegularization
from fl_lightning.callbacks.drift.mixed_ascent import MixedAscent
from fl_lightning.callbacks.drift.normalized_averaging import NormalizedAveraging
from fl_lightning.callbacks.drift.proximal_term import ProximalTerm
from fl_lightning.callbacks.drift.random_epochs import RandomEpochs
from fl_lightning.callbacks.drift.random_skips import RandomSkips
from fl_lightning.callbacks.drift.relaxed_initialization import RelaxedInitialization
from fl_lightning.callbacks.loggers.communication_logger import CommunicationLogger
from fl_lightning.callbacks.loggers.consensus_distance_logger import ConsensusDistanceLogger
from fl_lightning.callbacks.loggers.divergence_logger import DivergenceLogger
from fl_lightning.callbacks.loggers.drift_logger import DriftLogger
from fl_lightning.callbacks.loggers.exact_match import ExactMatch
from fl_lightning.callbacks.loggers.global_loss_logger import GlobalLossLogger
from fl_lightning.callbacks.loggers.hessian_logger import HessianLogger
from fl_lightning.callbacks.loggers.multiple_choice import MultipleChoice
from fl_lightning.callbacks.loggers.per_client_evaluation import PerClientEvaluation
from fl_lightning.callbacks.loggers.progress_bar import FederatedProgressBar
from fl_lightning.callbacks.loggers.run_card import RunCard
from fl_lightning.callbacks.losses.decorrelated_features import DecorrelatedFeatures
from fl_lightning.callbacks.losses.logit_calibration import LogitCalibration
from fl_lightning.callbacks.losses.model_contrast import ModelContrast
from fl_lightning.callbacks.losses.not_true_distillation import NotTrueDistillation
from fl_lightning.callbacks.losses.trajectory_distillation import TrajectoryDistillation
from fl_lightning.callbacks.personal.adaptive_local_aggregation import AdaptiveLocalAggregation
from fl_lightning.callbacks.personal.alternating_head import AlternatingHead
from fl_lightning.callbacks.personal.clustered_models import ClusteredModels
from fl_lightning.callbacks.personal.fixed_head import FixedHead
from fl_lightning.callbacks.personal.meta_gradient import MetaGradient
from fl_lightning.callbacks.personal.mixed_personal_model import MixedPersonalModel
from fl_lightning.callbacks.personal.moreau_envelope import MoreauEnvelope
from fl_lightning.callbacks.personal.partial_averaging import PartialAveraging
from fl_lightning.callbacks.personal.personal_head import PersonalHead
from fl_lightning.callbacks.personal.prototype_pull import PrototypePull
from fl_lightning.callbacks.personal.proximal_personal_model import ProximalPersonalModel
from fl_lightning.callbacks.robust.byzantine_clients import ByzantineClients
from fl_lightning.callbacks.robust.differential_privacy import DifferentialPrivacy
from fl_lightning.callbacks.robust.record_privacy import RecordPrivacy
from fl_lightning.callbacks.robust.robust_aggregation import RobustAggregation
from fl_lightning.callbacks.sending.error_feedback_21 import ErrorFeedback21
from fl_lightning.callbacks.sending.low_rank_update import LowRankUpdate
from fl_lightning.callbacks.sending.power_of_choice import PowerOfChoice
from fl_lightning.callbacks.sending.quantized_broadcast import QuantizedBroadcast
from fl_lightning.callbacks.sending.quantized_update import QuantizedUpdate
from fl_lightning.callbacks.sending.random_k import RandomK
from fl_lightning.callbacks.sending.sign_update import SignUpdate
from fl_lightning.callbacks.sending.top_k_compression import TopKCompression
from fl_lightning.callbacks.server.discrepancy_weights import DiscrepancyWeights
from fl_lightning.callbacks.server.extrapolated_step import ExtrapolatedStep
from fl_lightning.callbacks.server.fair_aggregation import FairAggregation
from fl_lightning.callbacks.server.lookahead_momentum import LookaheadMomentum
from fl_lightning.callbacks.server.update_memory import UpdateMemory
from fl_lightning.callbacks.sharpness.global_sharpness_aware_minimization import (
    GlobalSharpnessAwareMinimization,
)
from fl_lightning.callbacks.sharpness.global_update_guidance import GlobalUpdateGuidance
from fl_lightning.callbacks.sharpness.locally_estimated_perturbation import (
    LocallyEstimatedPerturbation,
)
from fl_lightning.callbacks.sharpness.momentum_guided_perturbation import MomentumGuidedPerturbation
from fl_lightning.callbacks.sharpness.server_ascent import ServerAscent
from fl_lightning.callbacks.sharpness.sharpness_aware_minimization import SharpnessAwareMinimization
from fl_lightning.systems import SystemHeterogeneity

__all__ = [
    "AdamDirection",
    "AdaptiveLocalAggregation",
    "AlignedDuals",
    "AlternatingHead",
    "AugmentedModels",
    "ByzantineClients",
    "ClientMomentum",
    "ClusteredModels",
    "CommunicationLogger",
    "ConsensusDistanceLogger",
    "ControlVariates",
    "CorrectedFactor",
    "DecayWithinRound",
    "DecorrelatedFeatures",
    "DifferentialPrivacy",
    "DiscrepancyWeights",
    "DisplacementDuals",
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
    "Gossip",
    "GradientTracking",
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
    "OrthogonalFactor",
    "PaddedRanks",
    "PartialAveraging",
    "PerClientEvaluation",
    "PersonalHead",
    "PowerOfChoice",
    "PrototypePull",
    "ProximalPersonalModel",
    "ProximalTerm",
    "PushSum",
    "QuantizedBroadcast",
    "QuantizedUpdate",
    "RandomEpochs",
    "RandomK",
    "RandomSkips",
    "RecordPrivacy",
    "RelaxedInitialization",
    "ResidualMerge",
    "RobustAggregation",
    "RunCard",
    "ScaledHeads",
    "ServerAscent",
    "SharpnessAwareMinimization",
    "SignUpdate",
    "SoapDirection",
    "StackedAdapters",
    "SystemHeterogeneity",
    "TopKCompression",
    "TrajectoryDistillation",
    "TruncatedProduct",
    "UpdateMemory",
]
