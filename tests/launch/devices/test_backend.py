"""What the executor asks of each kind of device, as far as that shows without a GPU."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from pipeplan_launch.devices.backend import CUDAStreams, Lane, backend_of, cuda_text
from pipeplan_launch.errors import LaunchError


def test_devices_that_are_not_there_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("xpu", "hpu", "mps", "meta"):
        with pytest.raises(LaunchError, match=f"does not run on devices of the kind '{kind}', only on cpu and cuda"):
            backend_of(kind)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LaunchError, match="torch finds none"):
        backend_of("cuda").select(0)


def test_a_gpu_is_chosen_among_those_that_the_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher may show each process all GPUs, or only its own."""
    chosen: list[Any] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for visible, number, expected in ((4, 3, 3), (1, 3, 0), (2, 3, 1)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda visible=visible: visible)
        assert backend_of("cuda").select(number) == torch.device("cuda", expected) == chosen[-1]


def test_nccl_needs_a_device_for_each_worker() -> None:
    assert backend_of("cuda").process_groups(own_device_each=True) == "cpu:gloo,cuda:nccl"
    assert backend_of("cuda").process_groups(own_device_each=False) == "gloo"
    assert backend_of("cpu").process_groups(own_device_each=True) == "gloo"


def test_what_is_posted_beside_waits_for_its_marks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """On recording streams: the lane waits for the events that it is given, and the computing stream for nothing."""
    calls = MagicMock()
    made = iter((calls.receives, calls.sends, calls.collectives))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: next(made))
    monkeypatch.setattr(torch.cuda, "Event", iter((calls.first, calls.second)).__next__)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    streams = CUDAStreams(torch.device("cuda", 0))
    first, second = streams.mark(), streams.mark()
    with streams.beside(Lane.SENDS, second):
        calls.posted()
    assert first is not second
    assert [name for name, _, _ in calls.mock_calls] == [
        *("first.record", "second.record", "sends.wait_event", "sends.__enter__", "posted", "sends.__exit__")
    ]
    calls.sends.wait_event.assert_called_once_with(second)


def test_devices_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA A100", "Tesla T4", "NVIDIA A100"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: names[number])
    assert cuda_text() == "3 GPUs (2 × NVIDIA A100, 1 × Tesla T4)"
    names.clear()
    assert cuda_text() == "0 GPUs"
