"""The rule by which a state with pending loads covers another: all that fits in front of the one fits in front of the
other, with every load added up message by message."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from checking import QUICK, written
from long_chains import chain

from pipeplan.checker.certificates.closure import stage_space
from pipeplan.checker.certificates.stages import CertificateStates, StageSpace
from pipeplan.checker.certificates.states import covered
from pipeplan.checker.document import PlanDocument
from pipeplan.checker.model import checked_model
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.util.files import Node

LIMIT = 10.0
Front = tuple[tuple[int, int], ...]
"""Stages in front, back to front, each as its first worker and one past its last."""


@dataclass(frozen=True)
class State:
    """Workers of the first stage, and the pending loads: outgoing and incoming of every level, and the cores."""

    first: int
    end: int
    loads: tuple[float, ...]


class Fronts:
    """What stages in front of a state do to the cards and cores of a cluster, message by message."""

    def __init__(self, space: StageSpace, sizes: tuple[tuple[float, float], ...], core_s: float) -> None:
        self.space, self.sizes, self.core_s = space, sizes, core_s

    def fit(self, state: State, front: Front) -> bool:
        """Whether every component keeps within the limit: what is pending, and what the stages in front add."""
        for level, part in self.space.columns:
            home = level.home.tolist()
            pending = home[state.first] if state.first != level.begin[home[state.first]] else -1
            for way, load in enumerate(state.loads[part]):
                busy = [0.0] * len(level.begin)
                if pending >= 0:
                    busy[pending] += load
                if not level.cores:
                    self._send(busy, home, state, front, way, level)
                else:
                    for first, end in front:
                        for worker in range(first, end):
                            busy[home[worker]] += self.core_s * level.share[home[worker]] / (end - first)
                if max(busy) > LIMIT + 1e-12:
                    return False
        return True

    def _send(self, busy: list[float], home: list[int], state: State, front: Front, way: int, level: Any) -> None:
        """Add the messages between the stages, and the rings of those in front, in one direction."""
        stages = [(state.first, state.end), *front]
        for (theirs, mine), (sent, returned) in zip(itertools.pairwise(stages), self.sizes, strict=False):
            senders, receivers = range(*mine), range(*theirs)
            period = math.lcm(len(senders), len(receivers))
            for minibatch in range(period):
                one, other = senders[minibatch % len(senders)], receivers[minibatch % len(receivers)]
                if home[one] != home[other]:
                    # The component of the state's other workers are complete, and were looked at with their stage.
                    out, back = (sent, returned) if way == 0 else (returned, sent)
                    busy[home[one]] += out / period * level.message[home[one]]
                    if mine != front[0] or home[other] == home[state.first]:
                        busy[home[other]] += back / period * level.message[home[other]]
        for first, end in front:
            for worker in range(first, end):
                following = first if worker + 1 == end else worker + 1
                if home[worker] != home[following]:
                    source = worker if way == 0 else following
                    busy[home[source]] += 2.0 * level.share[home[source]]


def _cluster(kind: str) -> Cluster:
    device = Device("d", "cpu", 1, cores=1 if "cores" in kind else 0)
    levels = {
        "2x2": (Level("server", 2, 4.0), Level("n1", 2, 2.0)),
        "3x2": (Level("server", 3, 4.0), Level("n1", 2, 2.0)),
        "2x2x2": (Level("n0", 2, 8.0), Level("n1", 2, 4.0), Level("n2", 2, 2.0)),
    }
    if kind != "unequal":
        return Cluster("test", device, levels[kind.split()[0]])
    servers = [Server(device, Level("server", count, 4.0), card) for count, card in ((1, 2.0), (3, 1.0), (2, 0.0))]
    return Cluster.of_servers("test", servers, [Level("n1", 3, 3.0)])


def _space(kind: str) -> StageSpace:
    problem = Problem(chain([Layer(name, 1.0, 1.0, 4, 0) for name in "abc"], 4), _cluster(kind), Options(memory=False))
    document = PlanDocument.of(Node(written(solve(problem, QUICK)), "plan.json"))
    model = checked_model(problem.profile, document)
    top = len(problem.cluster.levels)
    place = top, range(problem.cluster.workers)
    return stage_space(document, model, place, 1, among_s=0.0, step_times=(100.0, LIMIT))


def _fronts(first: int) -> Iterator[Front]:
    """All ways to put one or two stages in front of a worker, down to the first worker or not."""
    runs = [(start, end) for end in range(1, first + 1) for start in range(end)]
    yield from ((run,) for run in runs)
    yield from ((run, other) for run in runs for other in runs if other[1] <= run[0])


def _states(space: StageSpace, rng: random.Random, count: int) -> list[State]:
    workers, columns = space.runs.workers, sum(level.width for level in space.levels)
    spans = [(first, end) for first in range(workers) for end in range(first + 1, workers + 1)]
    found = []
    for _ in range(count):
        loads = [float(rng.choice([0, 2, 4, 6, 8])) for _ in range(columns)]
        first, end = rng.choice(spans)
        for level, part in space.columns:
            if first == level.begin[level.home[first]]:
                loads[part] = [0.0] * level.width
        found.append(State(first, end, tuple(loads)))
    return found


def _arrays(states: list[State]) -> CertificateStates:
    nothing = np.zeros(len(states), dtype=np.intp)
    return CertificateStates(
        cut=nothing + 1,
        first=np.array([state.first for state in states]),
        replicas=np.array([state.end - state.first for state in states]),
        demand=np.zeros(len(states)),
        loads=np.array([state.loads for state in states]),
        times=np.zeros((len(states), 0)),
        stages=nothing,
        busy=nothing,
    )


@pytest.mark.parametrize("kind", ["2x2", "3x2 cores", "2x2x2", "unequal", "2x2 cores"])
def test_what_fits_in_front_of_a_state_fits_in_front_of_those_that_cover_it(kind: str) -> None:
    rng, space = random.Random(kind), _space(kind)
    assert space.levels
    pairs = 0
    for _ in range(8):
        sizes = tuple((float(rng.randint(0, 16)), float(rng.randint(0, 16))) for _ in range(2))
        # The cut of the states carries the first of these sizes.
        sent, returned = np.array([0.0, sizes[0][0], 0.0, 0.0]), np.array([0.0, sizes[0][1], 0.0, 0.0])
        sized = replace(space, totals=replace(space.totals, sent=sent, returned=returned))
        fronts, states = Fronts(sized, sizes, float(rng.choice([0, 4, 12]))), _states(space, rng, 25)
        arrays = _arrays(states)
        fitting = [{front for front in _fronts(state.first) if fronts.fit(state, front)} for state in states]
        for index, state in enumerate(states):
            one = arrays.take(np.array([index]))
            for number in np.flatnonzero(covered(sized, arrays, one)).tolist():
                if number == index or not states[number].first:
                    continue
                pairs += 1
                for front in fitting[number]:
                    assert front in fitting[index], (state, states[number], front, sizes)
    assert pairs >= 60
