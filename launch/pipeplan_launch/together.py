"""Doing something in all workers of a group, where it may fail in any."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from pipeplan_launch import processes
from pipeplan_launch.errors import LaunchError

T = TypeVar("T")


class FailedElsewhere(Exception):
    """Another worker has reported an error: this one ends without a word."""


def together(group: dist.ProcessGroup, call: Callable[[], T]) -> T:
    """What `call` returns here. If it fails in any worker, all of them end, and one says why."""
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
