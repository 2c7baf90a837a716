"""Methods and loggers of a federated run, one a file: ``fl_lightning.callbacks``."""

if __name__ == "callbacks":
    raise ImportError("this is fl_lightning.callbacks: import it by that name")

from fl_lightning.callbacks.communication_logger import CommunicationLogger
from fl_lightning.callbacks.control_variates import ControlVariates
from fl_lightning.callbacks.divergence_logger import DivergenceLogger
from fl_lightning.callbacks.relaxed_initialization import RelaxedInitialization
from fl_lightning.callbacks.sharpness_aware_minimization import SharpnessAwareMinimization

__all__ = [
    "CommunicationLogger",
    "ControlVariates",
    "DivergenceLogger",
    "RelaxedInitialization",
    "SharpnessAwareMinimization",
]
