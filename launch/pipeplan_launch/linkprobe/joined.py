"""One worker of a survey, from meeting the others to the end."""

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
"""torchrun ends all workers as soon as one has: who has nothing to say leaves the first word to who has."""


def measure_joined(settings: Settings, levels: Levels, show: Show) -> Measured | None:
    """Be the worker that RANK and WORLD_SIZE say, as torchrun starts it: what was measured, at rank 0.

    Elsewhere None, also where another worker says what is wrong: then `SystemExit`. Raises `LaunchError`.
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
    """Meet the others in a store, and measure. Raises `LaunchError`, or `Silent` where another worker says why."""
    torch.set_num_threads(1)
    keep_freed_memory()
    meeting = meet(store, rank, world, _said(settings), settings.timeout_s)
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


def _said(settings: Settings) -> Hello | str:
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
