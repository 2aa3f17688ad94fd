"""plan.json as `solve` writes it, what `pipeplan check` finds of it, forged copies, and certificates made otherwise.

Forged copies of plan files with a proof, a gap or neither have any leaf changed, or any entry deleted. The certificates
of optimality are made in the plainest way, of all states that are reachable below a threshold, by the figures of the
oracle (`brute_formulas`): neither the planner's search nor the checker is involved.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

from brute_formulas import Costs, Stage, join
from brute_machines import Instance, sizes
from reported import branching, small_cluster

from pipeplan.checker.verify import CheckResult, check_plan
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem import plan_file
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering.plan_json import plan_document
from pipeplan.util.files import Node

Document = dict[str, Any]
QUICK = Settings(solver="dp", simulate=False, compare=False)


def written(outcome: Outcome) -> Document:
    """The plan.json of an outcome, as it is read from a file."""
    read: Document = json.loads(json.dumps(plan_document(outcome)))
    return read


def solved(problems: Iterable[Problem], settings: Settings = QUICK) -> Iterator[tuple[Problem, Outcome]]:
    """The outcomes of those problems that have one."""
    for problem in problems:
        try:
            yield problem, solve(problem, settings)
        except (InfeasibleError, InputError):
            continue


def findings(document: Document, profile: Profile) -> dict[str, CheckResult]:
    """All checks by name; only `document` if plan.json cannot be read."""
    try:
        results = check_plan(Node(document, "plan.json"), profile).results
    except InputError as error:
        results = (CheckResult("document", False, str(error)),)
    return {found.what: found for found in results}


def fault(document: Document, profile: Profile) -> str:
    """The first check that fails, as a line; empty if none does."""
    wrong = [found for found in findings(document, profile).values() if found.holds is False]
    return wrong[0].line if wrong else ""


def changed(document: Document, change: Callable[[Document], object]) -> Document:
    """A copy of a document with a change."""
    copied = copy.deepcopy(document)
    change(copied)
    return copied


def places(node: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of every value in a document."""
    keys: Any = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from places(node[key])


SENTINEL = "proven optimal by an oracle"
"""A text that no honest file holds."""
UNREAD = ("certificate_note", "seconds", "baselines", "choice", "learning", "text", "note", "path", "relative_path")
"""Fields that no check reads."""
FACTORS = (0.5, 0.9, 0.999, 0.999999, 1.000001, 1.001, 1.1, 2.0)
STEPS = (-1, 1, 0.1, -0.1)


@dataclass(frozen=True)
class Case:
    """An honest plan file, and the profile that it was made from."""

    name: str
    profile: Profile
    document: Document

    def forged(self, operations: int, seed: int) -> Document:
        """A copy with so many random changes."""
        rng, changed = random.Random(f"{self.name}-{operations}-{seed}"), copy.deepcopy(self.document)
        for _ in range(operations):
            _change(changed, rng)
        return changed


NAMES = (
    *("both", "single solver", "not certified", "cards", "bound", "cores", "one stage"),
    *("inference", "flush", "two phases", "buffered", "mixed"),
)
"""Kinds of plans, by what their files can claim."""


@cache
def case_of(name: str) -> Case:
    """The case of one of `NAMES`, solved when it is first asked for."""
    cards = Cluster("cards", Device("chip", "cuda", 10**9), (Level("server", 1, 0.0), Level("cluster", 3, 5e4, 1e-5)))
    cores = Cluster("cores", Device("chip", "cpu", 10**9, cores=2), (Level("server", 3, 1e12),))
    other = Server(Device("slow", "cuda", 10**9, 0.5), Level("server", 2, 1e9))
    mixed = Cluster.of_servers(
        "mixed", [Server(Device("chip", "cuda", 10**9), Level("server", 2, 1e9)), other], [Level("cluster", 2, 1e8)]
    )
    chosen: dict[str, tuple[Profile, Cluster, Options, Settings]] = {
        "both": (branching(4), small_cluster(), Options(), Settings()),
        "single solver": (branching(5), small_cluster(), Options(max_stages=3), Settings(solver="dp")),
        "not certified": (branching(4), small_cluster(), Options(), Settings(certify=False)),
        "cards": (branching(5), cards, Options(), Settings(solver="dp")),
        "bound": (branching(5), cards, Options(), Settings(solver="dp", gap=0.5)),
        "cores": (_even(6), cores, Options(overlap=0.0), Settings(solver="dp")),
        "one stage": (_heavy(), small_cluster(2, 2), Options(), Settings(solver="dp")),
        "inference": (branching(4), small_cluster(), Options(inference=True), Settings()),
        "flush": (branching(4), cards, Options(schedule="1f1b-flush", accumulate=4), Settings(solver="dp")),
        "two phases": (branching(3), small_cluster(1, 2), Options(schedule="gpipe", accumulate=4), Settings("dp")),
        "buffered": (branching(4), small_cluster(), Options(schedule="2bw", accumulate=8), Settings(solver="dp")),
        "mixed": (branching(4), mixed, Options(), Settings(solver="dp")),
    }
    assert tuple(chosen) == NAMES
    profile, cluster, options, settings = chosen[name]
    return Case(name, profile, written(solve(Problem(profile, cluster, options), settings)))


def _even(count: int) -> Profile:
    """Equal layers without parameters, which keep any number of workers busy."""
    layers = tuple(Layer(f"l{index}", 1.0, 2.0, 0, 8, update_s=0.25) for index in range(count))
    tensors = tuple(Tensor(f"t{index}", f"l{index}", (f"l{index + 1}",), 8, 8) for index in range(count - 1))
    return Profile(layers, tensors, 4, model_name="even")


def _heavy() -> Profile:
    """Two layers with so large an activation between them that one stage is best, whose all-reduce is not hidden."""
    layers = tuple(Layer(f"l{index}", 1.0, 2.0, 10**8, 0) for index in range(2))
    return Profile(layers, (Tensor("t", "l0", ("l1",), 10**9, 10**9),), 1, model_name="heavy")


@cache
def _solved(options: str, profile: str) -> Outcome:
    """What honest solvers say of the problem of a plan file."""
    case = next(case for case in map(case_of, NAMES) if case.profile.digest() == profile)
    problem, _ = plan_file.plan_from_document(Node(json.loads(options), "plan.json"), case.profile)
    return solve(problem, Settings(solver="dp", certify=False, simulate=False, compare=False))


def honest_outcome(document: Document) -> Outcome:
    """What the DP finds for the problem that a plan file describes."""
    problem = {key: document[key] for key in ("profile", "options", "cluster", "plan", "prediction")}
    problem["plan"], problem["prediction"] = ({**problem[key], "stages": []} for key in ("plan", "prediction"))
    return _solved(json.dumps(problem, sort_keys=True), document["profile"]["digest"])


def unread(document: Document) -> list[tuple[Any, Any]]:
    """(container, key) of all texts that no check reads, and of all that is inside of what no check reads."""
    found = [(holder, key) for holder, key in places(document) if key in UNREAD]
    return found + [inside for holder, key in found for inside in places(holder[key])]


def _change(document: Document, rng: random.Random) -> None:
    """Change one leaf of a document, or delete one entry."""
    ignored = {(id(holder), key) for holder, key in unread(document)}
    read = [(holder, key) for holder, key in places(document) if (id(holder), key) not in ignored]
    leaves = [place for place in read if not isinstance(place[0][place[1]], dict | list)]
    if rng.random() < 0.15:
        holder, key = rng.choice(read)
        del holder[key]
        return
    # A leaf is drawn by the name of its field first, so that certificates with many states do not take all draws.
    named = sorted({str(key) for _, key in leaves if isinstance(key, str)})
    wanted = rng.choice(named)
    holder, key = rng.choice([place for place in leaves if str(place[1]) == wanted] if rng.random() < 0.8 else leaves)
    holder[key] = _other(holder[key], [h[k] for h, k in leaves if isinstance(h[k], str)], rng)


def _other(value: Any, texts: list[str], rng: random.Random) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, max(0, value - 1), value * 2, 0, 1])
    if isinstance(value, float):
        return rng.choice([value * rng.choice(FACTORS), value + rng.choice(STEPS), 0.0, 1.0])
    if isinstance(value, str):
        return rng.choice([rng.choice(texts), SENTINEL, "optimal", ""])
    return rng.choice([0, 1, 0.5, "optimal", True])


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
