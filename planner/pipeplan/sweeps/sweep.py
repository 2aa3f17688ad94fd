"""Solves the points of a sweep, several of them in parallel processes.

A process reuses the results of its searches for one point in later points.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace

from pipeplan.errors import PipeplanError
from pipeplan.from_options.build_problem import build_problem
from pipeplan.plan.updates import Updates
from pipeplan.planning.candidate_search import DDP
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.solvers.result import Status
from pipeplan.sweeps.points import SweepPoint
from pipeplan.util import processes
from pipeplan.util.deadline import Deadline
from pipeplan.util.processes import interrupts_ignored, processors, spawned


@dataclass(frozen=True)
class PointAnswer:
    """The result of solving a point."""

    step_time_s: float | None = None
    """Step time of the plan, in seconds per minibatch; None if there is no plan."""
    over_parallelism: float | None = None
    """Speedup over data parallelism, even if data parallelism does not fit in memory; None if unknown."""
    parallelism_fits: bool = True
    """Whether data parallelism fits in memory."""
    config: str = ""
    bound: str = ""
    """Name of the slowest resource."""
    busy: int = 0
    """Number of busy workers."""
    proven: str = ""
    """The solvers that proved the plan optimal, or the remaining gap."""
    why: str = ""
    """The reason if there is no plan."""
    minibatch: int = 0
    """Number of samples of a minibatch of the plan. The choice of a schedule may have made it smaller."""
    schedule: str = ""
    synchronous: bool = True
    """Whether no gradient of the plan is stale."""


LEAST_S = 0.1
"""Smallest time limit of one point, in seconds. A small problem may need no more."""
OnAnswer = Callable[[int, PointAnswer], None]


def solve_point(point: SweepPoint, settings: Settings) -> PointAnswer:
    """Solve one point. An error becomes part of the answer."""
    try:
        outcome = _solved(point, replace(settings, compare=False))
    except PipeplanError as error:
        return PointAnswer(why=str(error))
    gain, fits = _over_parallelism(outcome)
    return PointAnswer(
        step_time_s=outcome.predicted_s,
        over_parallelism=gain,
        parallelism_fits=fits,
        config=outcome.plan.config,
        minibatch=outcome.problem.profile.minibatch,
        schedule=_schedule(point, outcome),
        synchronous=outcome.plan.inference or Updates.of(outcome.plan, outcome.problem.profile.minibatch).synchronous,
        bound=outcome.evaluation.bound,
        busy=outcome.plan.busy,
        proven=_proven(outcome),
    )


def _solved(point: SweepPoint, settings: Settings) -> Outcome:
    """The outcome of a point, including the choices that pipeplan makes."""
    deadline = Deadline.after(settings.time_limit_s)
    request = replace(point, maximum_cuts=settings.maximum_cuts, deadline=deadline, simulate=settings.simulate)
    built = build_problem(request)
    return solve(built.problem, settings, deadline=deadline, known=built.known, choice=built.choice)


def _schedule(point: SweepPoint, outcome: Outcome) -> str:
    """The schedule of the answer, or the name of its division of the weights."""
    sharding = outcome.problem.options.sharding
    if sharding.divides_weights:
        return str(sharding)
    return point.schedule if outcome.plan.inference else outcome.plan.schedule


def _over_parallelism(outcome: Outcome) -> tuple[float | None, bool]:
    """(speed-up over data parallelism at the same global batch or None, whether data parallelism fits in memory)."""
    if outcome.choice is not None:
        rival = outcome.choice.rival(DDP)
        own_s = outcome.predicted_s / outcome.problem.profile.minibatch
        return (None, False) if rival is None else (rival.sample_s / own_s, True)
    baseline = outcome.baselines[0]
    return baseline.gain(outcome.predicted_s), baseline.step_time_s is None or not baseline.remark


def _proven(outcome: Outcome) -> str:
    """The solvers that proved the plan optimal, `scoring` if the proof needs no solver, or the gap."""
    if outcome.status != Status.OPTIMAL:
        return f"gap {outcome.gap:.1%}"
    return "+".join(solver.split()[0] for solver in outcome.verdict.provers) or "scoring"


@dataclass(frozen=True)
class SharedTime:
    """The time that is left for the rest of a sweep. Each point gets an equal share when its turn comes."""

    ends: float
    """The end by `time.monotonic`, which all processes of a machine share."""
    points: int
    jobs: int

    def for_point(self, number: int) -> float:
        """Seconds for a point, given that earlier points are solved or being solved."""
        turns = math.ceil((self.points - number) / self.jobs)
        return max(LEAST_S, (self.ends - time.monotonic()) / turns)


def solve_points(
    points: Sequence[SweepPoint],
    settings: Settings,
    jobs: int | None,
    on_answer: OnAnswer,
    together_s: float | None = None,
) -> bool:
    """Solve all points, and call `on_answer` with the number and the answer of each. Returns False if interrupted.

    The settings limit the time of each point, and `together_s` the total time of all points.
    """
    jobs = min(jobs or processors(), len(points))
    time_left = None if together_s is None else SharedTime(time.monotonic() + together_s, len(points), max(1, jobs))
    try:
        if jobs <= 1:
            with processes.remember_interrupt() as check:
                for number, point in enumerate(points):
                    answer = _solve_in_turn(number, point, settings, time_left)
                    check()
                    on_answer(number, answer)
        else:
            _in_processes(points, settings, jobs, on_answer, time_left)
    except KeyboardInterrupt:
        return False
    return True


def _solve_in_turn(turn: int, point: SweepPoint, settings: Settings, time_left: SharedTime | None) -> PointAnswer:
    if time_left is not None:
        settings = replace(settings, time_limit_s=time_left.for_point(turn))
    return solve_point(point, settings)


def _in_processes(
    points: Sequence[SweepPoint], settings: Settings, jobs: int, on_answer: OnAnswer, time_left: SharedTime | None
) -> None:
    with spawned(jobs) as executor:
        with interrupts_ignored():
            futures = {
                executor.submit(_solve_in_turn, number, point, settings, time_left): number
                for number, point in enumerate(points)
            }
        for future in as_completed(futures):
            on_answer(futures[future], _answer(future))


def _answer(future: Future[PointAnswer]) -> PointAnswer:
    try:
        return future.result()
    except BrokenProcessPool:
        return PointAnswer(why="the process that solved it, or another one of this sweep, was killed (out of memory?)")
