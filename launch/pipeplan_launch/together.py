"""Runs a function in all workers of a group, where it may fail in any of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from pipeplan_launch import processes
from pipeplan_launch.errors import LaunchError

T = TypeVar("T")


class FailedElsewhere(Exception):
    """Another worker has reported an error, so this one ends without a message."""


def together(group: dist.ProcessGroup, call: Callable[[], T]) -> T:
    """Run `call` in all workers of the group; returns its result in this worker.

    If it raises `LaunchError` in any of them, the failing worker with the lowest rank raises its error and all others
    raise `FailedElsewhere`.
    """
    error, result = None, None
    try:
        result = call()
    except LaunchError as caught:
        error = caught
    lowest = processes.first_failure(error is not None, group)
    if lowest is not None:
        if error is not None and lowest == dist.get_rank():
            raise error
        raise FailedElsewhere
    return result  # type: ignore[return-value]
