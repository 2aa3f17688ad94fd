"""Goldens of the planner's answers: the bundled profiles on the bundled clusters, and random small problems.

All answers are solved without a time limit and without a certificate, because both of those end by the clock. The rest
of the search ends by counts, so that answers do not depend on how fast or how busy the machine is.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import entry_points

import pipeplan

PROCESSES = 2
PROFILES = ("alexnet", "awd-lm", "gnmt16", "gnmt8", "mnist", "resnet50", "s2vt", "vgg16")
CLUSTERS = ("A", "B", "C")
SCHEDULES = ("1f1b-stashing", "vertical-sync", "2bw", "gpipe", "1f1b-flush")
ACCUMULATING = ("2bw", "gpipe", "1f1b-flush")
ACCUMULATE = 64
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "grid": {"grid": True},
    "straight": {"max_replicas": 1, "allow_copies": False},
}
TOO_SLOW = frozenset(
    {
        *(f"gnmt16 {cluster} gpipe {kind}" for cluster in CLUSTERS for kind in KINDS),
        *(
            f"{profile} {cluster} 1f1b-stashing both-solvers"
            for profile in ("gnmt16", "resnet50")
            for cluster in CLUSTERS
        ),
    }
)
"""Keys of bundled plans that take up to 20 s on a quiet core, or more. They are stored as skipped, by this list and not
by the clock."""
RANDOM, RANDOM_ILP = 2000, 100

Answer = dict[str, Any]


def plans(every: int = 1) -> dict[str, Answer]:
    """The answers for all bundled profiles, clusters and schedules, by the DP; the default ones by both solvers too.

    With `every` n only the first of every n is solved.
    """
    keys = [
        f"{profile} {cluster} {schedule} {kind}"
        for kind in sorted(KINDS, reverse=True)  # those that take longest come first
        for schedule in SCHEDULES
        for cluster in CLUSTERS
        for profile in reversed(PROFILES)
    ]
    both = [f"{profile} {cluster} 1f1b-stashing both-solvers" for cluster in CLUSTERS for profile in PROFILES]
    return _in_parallel(bundled_answer, [*keys, *both][::every])


def random_problems(every: int = 1) -> dict[str, Answer]:
    """The answers for random small problems, by the DP; some by the ILP too. `every` is as for `plans`."""
    seeds = random.Random("goldens by the ILP").sample(range(RANDOM), RANDOM_ILP)
    keys = [f"{seed:04} {_kind(seed)} dp" for seed in range(RANDOM)]
    keys = [*(f"{seed:04} {_kind(seed)} ilp" for seed in sorted(seeds)), *keys]
    return _in_parallel(random_answer, keys[::every])


def bundled_answer(key: str) -> Answer:
    """The answer for one key of `plans`."""
    if key in TOO_SLOW:
        return {"skipped": "too slow"}
    profile, cluster, schedule, kind = key.split()
    options: dict[str, Any] = {"schedule": schedule, **KINDS.get(kind, {})}
    if schedule in ACCUMULATING:
        options["accumulate"] = ACCUMULATE
    solver = "both" if kind == "both-solvers" else "dp"
    return answer(pipeplan.read_profile(f"{profile}-v100"), pipeplan.cluster(cluster), solver, options)


def random_answer(key: str) -> Answer:
    """The answer for one key of `random_problems`, with the digests of what was drawn."""
    number, generator, schedule, shape, solver = key.split()
    draw = entry_points.random_generators()[generator]
    named = None if schedule == "any" else schedule

    def instance(seed: int) -> Any:
        drawn = draw(seed, named)
        return dataclasses.replace(drawn, grid=True) if shape == "grid" else drawn

    problem = entry_points.random_problem(int(number), instance)
    options = vars(problem.options)
    drawn = _digest([problem.profile.digest(), problem.cluster.digest(), sorted(options.items())])
    if not entry_points.feasible(problem):
        return {"drawn": drawn, "raises": "InfeasibleError"}
    return {"drawn": drawn, **answer(problem.profile, problem.cluster, solver, options)}


def _kind(seed: int) -> str:
    """What is drawn for a seed: the generator, the schedule, and whether a uniform grid is asked for."""
    generator = ("random", "mixed", "unequal", "crowded", "mixed", "unequal")[seed % 6]
    schedule = "any" if generator == "random" else (*SCHEDULES, "any")[seed // 6 % 6]
    if generator == "crowded" and schedule == "any":
        schedule = SCHEDULES[0]
    return f"{generator} {schedule} {'grid' if seed // 36 % 5 == 4 else 'free'}"


def answer(profile: pipeplan.Profile, cluster: pipeplan.Cluster, solver: str, options: dict[str, Any]) -> Answer:
    """The figures of an answer as plan.json has them, and digests of its parts, without any prose."""
    settings = pipeplan.Settings(solver=solver, time_limit_s=None, certify=False, simulate=False)
    try:
        outcome = pipeplan.solve(profile, cluster, settings=settings, **options)
    except pipeplan.PipeplanError as error:
        return {"raises": type(error).__name__}
    with tempfile.TemporaryDirectory() as folder:
        pipeplan.render(outcome, folder)
        document = json.loads((Path(folder) / "plan.json").read_text(encoding="utf-8"))
        stages = [json.loads(path.read_text("utf-8")) for path in sorted((Path(folder) / "stages").iterdir())]
        for stage in stages:
            del stage["checksum"]  # follows from the rest
    baselines = [[one["minibatch_s"], one["config"], one["gain"]] for one in document["baselines"]]
    solvers = [[one["status"], one["config"], one["minibatch_s"]] for one in document["verdict"]["solvers"]]
    return {
        "objective_s": document["prediction"]["minibatch_s"],
        "bound_s": document["bound_s"],
        "status": document["status"],
        "config": document["plan"]["config"],
        "plan": _digest(document["plan"]),
        "prediction": _digest(document["prediction"]),
        "baselines": _digest(baselines),
        "solvers": _digest([*solvers, document["verdict"]["proven"]]),
        "stages": _digest(stages),
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:10]


def _in_parallel(function: Callable[[str], Answer], keys: Iterable[str]) -> dict[str, Answer]:
    """The answers for all keys. Fresh interpreters, whose strings hash differently each, are a test of their own."""
    keys = list(keys)
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        return dict(zip(keys, pool.map(function, keys, chunksize=1 if len(keys) < 1000 else 20), strict=True))
