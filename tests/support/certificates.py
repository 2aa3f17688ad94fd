"""Certificates of optimality made in the plainest way: all states that are reachable below a threshold.

The figures are those of the oracle (`brute_formulas`): neither the planner's search nor the checker is involved.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

from brute_formulas import Costs, Stage, join
from brute_machines import Instance, sizes

TOLERANCE = 1e-9


class State(NamedTuple):
    """All that a stage in front of a cut has to know of what is behind it."""

    cut: int
    first: int
    """First worker of the stage behind."""
    replicas: int
    """Replicas of that stage."""
    demand: float
    stages: int
    """Behind the cut; 0 where that is of no account. So are the workers."""
    busy: int


def certificate(instance: Instance, step_time: float) -> dict[str, Any]:
    """That no plan of an instance is faster than `step_time`, as plan.json holds it; a forgery where one is."""
    spans, spaces = sizes(instance), []
    levels = [level for level in range(len(spans) - 1, 0, -1) if level == len(spans) - 1 or instance.allow_copies]
    done: set[int] = set()
    for level in levels:
        size, copies = spans[level], spans[-1] // spans[level]
        small = size < max(2, instance.stages or 1) and copies > 1
        if size not in done and not small:
            for count in [1] if copies == 1 else range(2, copies + 1):
                if count <= _most_copies(instance):
                    spaces += _entries(instance, step_time, level, count)
        done.add(size)
    return {"tolerance": TOLERANCE, "spaces": spaces}


def _most_copies(instance: Instance) -> float:
    """With more copies one of them has no worker, or under 2BW no minibatch."""
    minibatches = instance.accumulate if instance.kind == "2bw" else None
    return min(instance.max_workers or math.inf, minibatches or math.inf)


def _entries(instance: Instance, step_time: float, level: int, copies: int) -> list[dict[str, Any]]:
    """One entry, or where layers are pinned one for every number of stages that there may be."""
    if instance.stages is not None or not instance.pins:
        return [_space(instance, step_time, level, copies)]
    lowest = max(stage for _, stage in instance.pins)
    highest = min(len(instance.layers), sizes(instance)[level], instance.max_stages or len(instance.layers))
    counts = range(lowest, highest + 1)
    return [_space(replace(instance, stages=count), step_time, level, copies) | {"stages": count} for count in counts]


def _space(instance: Instance, step_time: float, level: int, copies: int) -> dict[str, Any]:
    size = sizes(instance)[level]
    costs = Costs(instance, copies, place=(set(range(size)), size))
    among = costs.among / costs.update
    floor = join(costs.least[costs.everything] / (copies * size), among, instance.overlap)
    if max(floor, among) >= step_time:
        return {"level": level, "copies": copies, "floor_s": floor}
    threshold = copies * _alone(step_time, among, instance.overlap)
    states = minimal(reachable(instance, level, copies, threshold * (1 - TOLERANCE)), instance)
    cuts = sorted({state.cut for state in states})
    counted = bool(instance.stages or instance.max_stages), bool(instance.max_workers)
    return {
        "level": level,
        "copies": copies,
        "threshold_s": threshold,
        "cuts": [f"{cut:x}" for cut in cuts],
        "states": [
            [cuts.index(state.cut), state.first, state.replicas, state.demand]
            + [state.stages] * counted[0]
            + [state.busy] * counted[1]
            for state in states
        ],
    }


def _alone(step_time: float, among: float, overlap: float) -> float:
    """What one copy may take so that with synchronisation `among` the copies it makes `step_time`."""
    longer = step_time - (1 - overlap) * among
    return longer if longer >= among else (step_time - among) / (1 - overlap)


def reachable(instance: Instance, level: int, copies: int, threshold: float) -> list[State]:
    """The least demands of every state below a threshold, but for those with no layer or no worker left in front."""
    spans = sizes(instance)
    costs = Costs(instance, copies, place=(set(range(spans[level])), spans[level]))
    most = instance.stages or instance.max_stages or math.inf
    workers = instance.max_workers // copies if instance.max_workers else math.inf
    least: dict[tuple[int, ...], float] = {(costs.everything, spans[level], 0, 0, 0): 0.0}
    for after in sorted(costs.cuts, key=lambda cut: -cut.bit_count()):
        for (cut, first, replicas, stages, busy), demand in list(least.items()):
            if cut != after or stages >= most:
                continue
            for stage, leads in _stages(costs, spans, State(cut, first, replicas, demand, stages, busy), threshold):
                counts = stages + (most < math.inf), busy + stage.replicas * (workers < math.inf)
                if counts[1] <= workers and _pinned(instance, stage.before, counts[0]):
                    key = (stage.before, stage.start, stage.replicas, *counts)
                    least[key] = min(leads, least.get(key, math.inf))
    states = [State(*key[:3], demand, *key[3:]) for key, demand in least.items()]
    return [
        state
        for state in states
        if state.cut != 0
        and state.stages < most
        and _hopeful(costs, state, min(state.first, workers - state.busy), threshold)
    ]


def _pinned(instance: Instance, cut: int, behind: int) -> bool:
    """Whether of the layers that are pinned to stages a cut has just those of the stages that are missing."""
    missing = (instance.stages or 0) - behind
    return all((cut >> layer & 1) == (stage <= missing) for layer, stage in instance.pins)


def _hopeful(costs: Costs, state: State, room: float, threshold: float) -> bool:
    """Whether as many workers in front can do the work."""
    return state.cut == costs.everything or (room > 0 and costs.least[state.cut] <= room * threshold)


def _stages(costs: Costs, spans: list[int], state: State, threshold: float) -> list[tuple[Stage, float]]:
    """The stages that can stand in front of a state, and the demand of each."""
    instance, after, first = costs.instance, state.cut, state.first
    most = instance.max_replicas or first
    found = []
    for before in costs.cuts:
        if before & ~after or before == after:
            continue
        for end in range(1, first + 1):
            for start in range(max(0, end - most), end):
                for recompute in (False, True) if instance.recompute and costs.training else (False,):
                    stage = costs.stage(before, after, start, end, recompute)
                    leads = _leads(costs, spans, stage, state, threshold)
                    if leads is not None:
                        found.append((stage, leads))
    return found


def _leads(costs: Costs, spans: list[int], stage: Stage, behind: State, threshold: float) -> float | None:
    """The demand of a stage in front of a state, None where it is too slow or does not fit."""
    depth, busy, buffered = 1, 0.0, costs.instance.kind == "2bw"
    wait = costs.wait(stage, threshold) if costs.training else 0.0
    if stage.after != costs.everything:
        # A next stage of one worker, so placed that it is joined at the same level.
        level = _level(stage.start, behind.first + behind.replicas - 1, spans)
        last = (stage.start // spans[level] + 1) * spans[level] - 1
        link = costs.link(stage, _on_one(stage, last))
        lanes = min(stage.replicas, behind.replicas) if costs.instance.boundary == "parallel" else 1
        busy = max(link.there, link.back) / lanes
        if costs.training:
            depth = 1 + math.ceil((behind.demand + wait + 2 * link.passing / threshold) / stage.replicas - 1e-9)
    versions = 2 if buffered else depth + costs.lag(stage)
    sets = 2 * versions - 1 if costs.instance.corrected else versions
    memory = stage.constant + depth * stage.growing + (sets * stage.weights if costs.training else 0.0)
    if max(stage.time, busy) > threshold or memory > stage.memory:
        return None
    if buffered and not costs._in_time(stage, depth, threshold):
        return None
    return depth * stage.replicas + wait if costs.training and (buffered or math.isfinite(stage.memory)) else 0.0


def _on_one(stage: Stage, worker: int) -> Stage:
    """A stage behind another, on one worker."""
    return stage._replace(before=stage.after, start=worker, end=worker + 1)


def _level(first: int, last: int, spans: list[int]) -> int:
    return next(level for level, size in enumerate(spans) if first // size == last // size)


def minimal(states: list[State], instance: Instance) -> list[State]:
    """The states that no other one stands for."""
    kept: list[State] = []
    for state in states:
        if not any(stands_for(other, state, instance) for other in kept):
            kept = [other for other in kept if not stands_for(state, other, instance)] + [state]
    return kept


def stands_for(other: State, state: State, instance: Instance) -> bool:
    """The rule of docs/proof.md, by a worker's place in each component that it is in."""
    spans = sizes(instance)
    if other.cut != state.cut or other.demand > state.demand or other.busy > state.busy:
        return False
    if instance.boundary == "parallel" and other.replicas < state.replicas:
        return False
    if other.stages > state.stages or (instance.stages is not None and other.stages != state.stages):
        return False
    # The state that stands for another ends within the component that joins the other with the stages in front.
    ahead = max(state.first - 1, 0)
    size = spans[_level(ahead, max(state.first + state.replicas - 1, 0), spans)]
    return other.first >= state.first and other.first + other.replicas <= (ahead // size + 1) * size
