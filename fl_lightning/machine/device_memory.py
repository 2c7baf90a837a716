"""Memory that the process keeps for reuse, and copies to a GPU and back through pinned memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import Any

import torch
from torch import Tensor

# Constants of malloc.h.
M_TRIM_THRESHOLD = -1
M_TOP_PAD = -2
M_MMAP_THRESHOLD = -3
# The value in prctl.h.
PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int) -> None:
    """Let this process be killed when the process ``parent`` ends, for whatever reason."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have ended before this process asked to follow it.
    if os.getppid() != parent:
        os._exit(137)


def keep_memory() -> None:
    """Let the C library keep the memory of freed tensors for later ones, in this process.

    By default glibc returns large blocks to the system, which then clears every page again in each
    local step: a tenth of a convolutional network's time. Settings of malloc in the environment
    take precedence; without glibc nothing happens.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):
        return
    # The first is the largest allowed value. With the second a thread's memory grows by at least
    # 2**26 bytes, and shrinks by no less.
    mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(M_TOP_PAD, 2**26)
    mallopt(M_MMAP_THRESHOLD, 2**25)


def prepare_process(device: torch.device) -> None:
    """Let the process keep memory, and make a GPU's kernels give the same bits each time."""
    keep_memory()
    if device.type != "cuda":
        return
    # By default torch rounds the inputs of convolutions to ten bits (TF32), and those of other
    # products not. Whoever asks for TF32 in products gets it in convolutions, too.
    if torch.get_float32_matmul_precision() == "highest":
        torch.backends.cudnn.allow_tf32 = False
    # Trainer(benchmark=True) asks for the fastest kernels, even if their bits vary.
    if not torch.backends.cudnn.benchmark:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.deterministic = True


def to_device(value: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor, array or list of numbers as a tensor on ``device``.

    A copy from pageable memory would wait for everything queued on the stream before. With several
    epochs per client, clients would then run one after the other, whatever their streams.
    """
    tensor = torch.as_tensor(value, dtype=dtype)
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the rows in the host's memory."""
    on_host = {key: row.detach() for key, row in rows.items()}
    pinned: dict[str, Tensor] = {}
    for key, row in on_host.items():
        if row.is_cuda:
            pinned[key] = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
            pinned[key].copy_(row, non_blocking=True)
    # Copies from a GPU run in parallel; this waits once for all of them.
    if pinned:
        torch.cuda.current_stream().synchronize()
    # Whoever gets the rows may keep them, and pinned memory is for the next copies.
    return on_host | {key: row.clone() for key, row in pinned.items()}
