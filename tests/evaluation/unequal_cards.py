"""Measures the plan for two unequal workers beside every split by hand. docs/cards.md has the table.

    PYTHONPATH=tests/support python tests/evaluation/unequal_cards.py [--updates 4]

One worker is half as fast as the other and has two thirds of its memory. The model is a chain of twelve layers, the
first and the last of which hold much memory. Every place to cut it is run, with either worker first, and every division
of the batch under data parallelism; then the plans for workers of little memory, in which the whole model does not fit,
and of much. Executor, messages and exchanges of gradients are real. Each worker sleeps as long as its layers would take
at its speed, so that other programs on this machine disturb little. Takes about ten minutes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from replay import replay_plan
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from worker_host import start_attempt

from pipeplan import api
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cost.depths import assign_depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.plan import Plan, Stage, data_parallel
from pipeplan.plan.schedules import FLUSH
from pipeplan.planning.figure import figured
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.question import Machines
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.layers import Tensor as Flow
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering.plan_folder import write_plan
from pipeplan.util.deadline import NO_DEADLINE
from pipeplan_launch import Data, Job, __main__

MIB, BATCH = 2**20, 8
FORWARD_MS = (2, 6, 6, 4, 6, 6, 4, 6, 6, 4, 6, 4)
WEIGHTS_MIB = (48, 8, 8, 4, 8, 8, 4, 8, 8, 4, 8, 32)
LITTLE, MUCH = 300 * MIB, 990 * MIB
"""Memory of the fast worker; the slow one has two thirds of it."""
TIMES = "PIPEPLAN_UNEQUAL_CARDS"
"""Environment variable: the seconds of a forward pass of the whole model on the worker."""


@dataclass(frozen=True)
class Split:
    """One way to use both workers, and what became of it. Times are seconds for each microbatch."""

    name: str
    planned_s: float
    measured_s: float
    needs: Mapping[str, float]
    """Bytes of each worker by the name of its device."""

    def fits(self, memory: int) -> bool:
        """Whether the split fits where the fast worker has this memory."""
        return all(self.needs[device.name] <= device.memory_bytes for device in devices(memory))


def devices(memory: int) -> tuple[Device, Device]:
    """The fast worker, which has this memory, and the slow one."""
    return Device("fast", "cpu", memory), Device("slow", "cpu", memory * 2 // 3, speed=0.5)


def machines(memory: int = MUCH, *, slow_first: bool = False) -> Machines:
    """The model and the two workers."""
    names = [f"layer{number}" for number in range(len(FORWARD_MS))]
    layers = tuple(
        Layer(name, ms / 1e3, 2 * ms / 1e3, size * MIB, 2 * MIB)
        for name, ms, size in zip(names, FORWARD_MS, WEIGHTS_MIB, strict=True)
    )
    flows = tuple(Flow(one, one, (other,), 64 << 10, 64 << 10) for one, other in itertools.pairwise(names))
    profile = Profile(layers, flows, 1, model_name="chain", model_ref="chain", graph_hash="sha256:0")
    order = devices(memory)[:: -1 if slow_first else 1]
    return Machines(profile, Cluster.of_devices("two cards", order, Level("server", 2, 100e9, 5e-5)))


def problem_of(made: Machines, **options: Any) -> Problem:
    """The problem of one update of `BATCH` microbatches on the two workers."""
    return Problem(made.profile, made.cluster, Options(schedule=FLUSH, accumulate=BATCH, recompute=False, **options))


def by_hand() -> Iterator[tuple[Plan, Problem]]:
    """Every pipeline of two stages, and every division of the batch."""
    for slow_first in (False, True):
        problem = problem_of(machines(slow_first=slow_first), memory=False)
        names = problem.layer_names
        for cut in range(1, len(names)):
            stages = (Stage(names[:cut], (0,), 1, 1), Stage(names[cut:], (1,), 1, 1))
            plan = Plan(stages, schedule=FLUSH, accumulate=BATCH)
            yield assign_depths(plan, problem, problem.work_s), problem
    problem = problem_of(machines(), stages=1, unequal_shares=True, memory=False)
    plain = data_parallel(problem.layer_names, 2, inference=False, schedule=FLUSH, accumulate=BATCH)
    for mine in range(1, BATCH):
        yield replace(plain, stages=(replace(plain.stages[0], shares=(mine, BATCH - mine)),)), problem


def measured(plan: Plan, problem: Problem, updates: int) -> Split:
    """The plan after a run of so many updates."""
    score = evaluate(plan, problem)
    found = figured(plan, score, problem, NO_DEADLINE)
    shown = "-".join(str(len(stage.layers)) for stage in plan.stages)
    first = problem.cluster.devices[plan.stages[0].workers[0]].name
    name = f"DDP {plan.config}" if len(plan.stages) == 1 else f"pipeline {shown}, {first} first"
    outcome = replace(_solved(problem), plan=plan, evaluation=score, figure=found.figure)
    with tempfile.TemporaryDirectory() as made:
        write_plan(outcome, Path(made) / "plan")
        run = _run_shares if plan.stages[0].shares else _replayed
        took_s = run(Path(made) / "plan", outcome, updates)
    names = [device.name for device in problem.cluster.devices]
    pairs = [(stage, cost.memory_bytes) for stage, cost in zip(plan.stages, score.stages, strict=True)]
    return Split(name, found.step_s, took_s, {names[one]: size for stage, size in pairs for one in stage.workers})


@cache
def _solved(problem: Problem) -> Outcome:
    """Any outcome of the problem, for the fields that do not depend on the plan."""
    return solve(problem, Settings("dp", simulate=False, certify=False))


def _replayed(folder: Path, outcome: Outcome, updates: int) -> float:
    replayed = replay_plan(folder, outcome.problem.profile, updates * BATCH * outcome.predicted_s)
    return replayed.measured_s


def _run_shares(folder: Path, outcome: Outcome, updates: int) -> float:
    """Train a model that sleeps under the data-parallel engine; returns seconds for each microbatch after the first
    update."""
    stage = folder / "stages" / "stage-0.json"
    content = json.loads(stage.read_text()) | {"model": {"ref": f"{__file__}:sleeping"}, "layers": ["all"]}
    del content["checksum"]
    stage.write_text(json.dumps(content))
    arguments = [str(folder), "--run-dir", str(folder / "run"), "--threads", "1", "--probe", "0", "--no-self-check"]
    whole_s = sum(FORWARD_MS) / 1e3
    times = [{TIMES: f"{whole_s / device.speed} {updates}"} for device in outcome.problem.cluster.devices]
    workers = start_attempt(__main__.main, [([*arguments, "--epochs", "1"],)] * 2, folder, variables=times)
    ended = workers.finish()
    assert ended.statuses == [0, 0], ended.err
    ends = dict[int, float]()
    for path in (folder / "run" / "metrics").iterdir():
        for row in map(json.loads, path.open()):
            update = row["minibatch"] // BATCH
            ends[update] = max(ends.get(update, 0.0), row["time_s"])
    return (ends[updates - 1] - ends[0]) / (updates - 1) / BATCH


class _Sleep(torch.autograd.Function):
    """Sleeps in both passes."""

    @staticmethod
    def forward(context: Any, x: Tensor, seconds: float) -> Tensor:  # type: ignore[override]
        context.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(2 * context.seconds)
        return gradient, None


class _Sleeper(nn.Module):
    """A model whose passes take as long as the environment says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1000))
        self.seconds = float(os.environ.get(TIMES, "0 1").split()[0])

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(x + self.weight[0], self.seconds)  # type: ignore[no-any-return, no-untyped-call]


def sleeping() -> Job:
    """A job of some updates of the sleeping model."""
    samples = BATCH * int(os.environ.get(TIMES, "0 1").split()[1])
    data = TensorDataset(torch.zeros(samples, 1), torch.zeros(samples, 1))
    return Job(_Sleeper(), loss=nn.functional.mse_loss, data=lambda: Data(data), minibatch=1)


def main(words: list[str]) -> None:
    """Run all splits and the plans, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=4, help="updates of each run")
    given = parser.parse_args(words)
    splits = sorted((measured(*one, given.updates) for one in by_hand()), key=lambda one: one.measured_s)
    print(f"{'split':<34}{'fits in':>16}{'predicted':>11}{'measured':>10}, ms a microbatch")
    for one in splits:
        _print_row(one)
    for word, memory in (("little", LITTLE), ("much", MUCH)):
        made = machines(memory)
        solved = api.solve(made.profile, made.cluster, batch=BATCH, microbatch=1, recompute=False)
        mine = measured(solved.plan, solved.problem, given.updates)
        best = next(one for one in splits if one.fits(memory))
        print(f"\nThe plan for {word} memory, {solved.plan.schedule}; the best split that fits is {best.name}:")
        _print_row(mine)
        print(f"It takes {mine.measured_s / best.measured_s - 1:+.1%}.")


def _print_row(one: Split) -> None:
    fits = " and ".join(word for word, memory in (("little", LITTLE), ("much", MUCH)) if one.fits(memory)) or "neither"
    print(f"{one.name:<34}{fits:>16}{one.planned_s * 1e3:>11.1f}{one.measured_s * 1e3:>10.1f}")


if __name__ == "__main__":
    main(sys.argv[1:])
