"""Streams of a device beside the one that computes, on which messages wait for what they need.

A mark is a point in the computing stream. What is posted in `beside` starts after the marks that it is given, whatever
is handed to the computing stream meanwhile; the host does not wait. A CPU computes at once, so nothing has to wait.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from typing import Any, Protocol

import torch


class Lane(IntEnum):
    """The streams beside computing."""

    RECEIVES = 0
    SENDS = 1
    COLLECTIVES = 2


class Streams(Protocol):
    """The streams of one worker's device."""

    def mark(self) -> Any:
        """A mark after all that has been handed to the computing stream so far."""

    def beside(self, lane: Lane, *after: Any) -> AbstractContextManager[None]:
        """Context in which operations are posted to a lane, to start after these marks."""


class NoStreams:
    """The streams of a CPU, which computes at once."""

    def mark(self) -> None:
        """Nothing has to be waited for."""

    def beside(self, lane: Lane, *after: Any) -> AbstractContextManager[None]:
        """A context that changes nothing."""
        return nullcontext()


class CUDAStreams:
    """The streams of a CUDA device. The computing stream is the one that is current outside of `beside`."""

    def __init__(self, device: torch.device) -> None:
        self._lanes: list[Any] = [torch.cuda.Stream(device) for _ in Lane]  # type: ignore[no-untyped-call]

    def mark(self) -> Any:
        """An event in the current stream."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    @contextmanager
    def beside(self, lane: Lane, *after: Any) -> Iterator[None]:
        """The lane's stream as the current one, after it has been made to wait for these events."""
        stream = self._lanes[lane]
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            yield
