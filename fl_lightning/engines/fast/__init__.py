"""Ways of training that only save time: recorded steps, streams of a GPU, stacks of clients.

`engines/fast_switch.py` is the one way in. Without this folder every run gives the same results (up
to rounding if clients would be stacked), and takes longer.
"""

from fl_lightning.engines.fast.capture import Capture, own_stream, why_not_captured
from fl_lightning.engines.fast.gpu_streams import Streams
from fl_lightning.engines.fast.stacked import Stacked, why_not_stacked

__all__ = ["Capture", "Stacked", "Streams", "own_stream", "why_not_captured", "why_not_stacked"]
