"""plan.json as `solve` writes it, what `pipeplan check` finds of it, and forged copies.

Forged copies of plan files with a proof, a gap or neither have any leaf changed, or any entry deleted.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

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
