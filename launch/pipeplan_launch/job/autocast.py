"""Autocast: computing in bfloat16 where possible, with weights, gradients and updates in the model's own precision.

`torch.export` records operators as the model calls them, above autocast: the graph holds no casts, and the types that
it notes are those under the autocast that was on. So a stage runs under the same autocast, and computes the same as
the model, bit by bit.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from pipeplan_launch.errors import LaunchError


def check_autocast_type(dtype: object) -> None:
    """Raises `LaunchError` for a type that a job cannot autocast to."""
    if dtype is None or dtype is torch.bfloat16:
        return
    if dtype is torch.float16:
        raise LaunchError("a job's autocast cannot be torch.float16, which needs its losses scaled: use torch.bfloat16")
    raise LaunchError(f"a job's autocast must be torch.bfloat16 or None, not {dtype!r}")


def autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Context for a forward pass and its loss; with None nothing is cast."""
    if dtype is None:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)
