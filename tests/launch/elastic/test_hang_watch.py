"""Who hangs is ended; who makes progress, or rests, is not."""

from __future__ import annotations

import threading
import time

import pytest

from pipeplan_launch.elastic import graceful_stop
from pipeplan_launch.elastic.graceful_stop import HangWatch


def test_only_an_action_that_does_not_end_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graceful_stop, "GRACE_S", 0.5)
    ended: list[float] = []
    hung = threading.Event()
    watch = HangWatch(0.5, lambda seconds: ended.append(seconds) or hung.set())  # type: ignore[func-returns-value]
    assert not hung.wait(1.5), "nothing has begun"
    watch.progress()
    watch.rest()
    assert not hung.wait(1.5), "the segment has ended"
    began = time.monotonic()
    watch.progress()
    assert hung.wait(30)
    assert 1.0 < ended[0] <= time.monotonic() - began
