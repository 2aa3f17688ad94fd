"""One worker of the link benchmark, from the rendezvous to the end."""

from __future__ import annotations

import os
import time
from typing import Any

import torch
import torch.distributed as dist

from pipeplan_launch import processes
from pipeplan_launch.allocator import keep_freed_memory
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.linkprobe.meeting import Hello, Silent, env_store, hello, join, meet
from pipeplan_launch.linkprobe.parting import Parting
from pipeplan_launch.linkprobe.settings import Levels, Measured, Settings, Show
from pipeplan_launch.linkprobe.survey import Survey

QUIET_S = 1.5
"""Delay before a worker without a message ends. torchrun kills all workers as soon as one has ended, and the one that
reports the error must come first."""


def measure_joined(settings: Settings, levels: Levels, show: Show) -> Measured | None:
    """Run the worker that RANK and WORLD_SIZE name, as torchrun sets them; returns the result at rank 0, else None.

    Raises `LaunchError`, or `SystemExit` if another worker reports the error.
    """
    rank, world = _number("RANK"), _number("WORLD_SIZE")
    if not 0 <= rank < world:
        raise LaunchError(f"RANK is {rank} and WORLD_SIZE {world}: ranks count from 0 to WORLD_SIZE - 1")
    if world < 2:
        raise LaunchError("WORLD_SIZE is 1, and there is no link without a second worker: start at least two")
    try:
        return take_part(env_store(rank, settings.timeout_s), rank, world, settings, levels, show)
    except Silent:
        time.sleep(QUIET_S)
        raise SystemExit(2) from None


def take_part(store: Any, rank: int, world: int, settings: Settings, levels: Levels, show: Show) -> Measured | None:
    """Meet the other workers in a store, and measure; returns the result at rank 0, else None.

    Raises `LaunchError`, or `Silent` if another worker reports the error.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    meeting = meet(store, rank, world, _hello_or_refusal(settings), settings.timeout_s)
    parting = Parting(meeting)
    try:
        device, backend = join(meeting, settings.timeout_s)
        survey = Survey(meeting, settings, device, backend)
        measured = survey.run(levels, show)
        processes.wait_for(survey.everyone)
        parting.end()
        dist.destroy_process_group()
    except LaunchError as error:
        raise parting.explain(error) from error
    return measured


def _hello_or_refusal(settings: Settings) -> Hello | str:
    if settings.refusal:
        return settings.refusal
    try:
        return hello(settings)
    except LaunchError as error:
        return str(error)


def _number(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise LaunchError(f"{name} is {text!r}: it must be a number, as torchrun sets it")
    return int(text)
