"""`pipeplan check` of plans whose workers run several stages each: honest files hold, and changed ones do not."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from extents import first_few, slow_but_for

from pipeplan.checker.verify import CheckedPlan, check_readable_plan
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.errors import InfeasibleError
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.rendering import plan_json
from pipeplan.util.files import Node

Document = dict[str, Any]
COSTS = ExecutorCosts(pass_s=1e-3, message_s=2e-3, message_byte_s=1e-9, worker_bytes=50.0, allocator_share=1.0)
FIGURES = ("minibatch_s", "batch", "stages", "copies_synchronisation_s", "minibatches_per_s")


def problem_of(seed: int) -> Problem:
    """A random chain on a random cluster, in a half of the cases with so little memory that some stages recompute."""
    rng = random.Random(seed)
    schedule, count = rng.choice(("interleaved-1f1b", "zb-v")), rng.randint(6, 12)
    layers = tuple(
        Layer(f"l{i}", *(rng.uniform(0.5, 2.0) for _ in range(2)), rng.choice((0, 100)), rng.randint(1, 50))
        for i in range(count)
    )
    # Another generator, so that the rest of what is drawn does not depend on it.
    workspaces = random.Random(f"workspace {seed}")
    layers = tuple(replace(layer, workspace_bytes=workspaces.choice((0, 10, 40))) for layer in layers)
    sizes = [rng.randint(0, 40) for _ in range(count)]
    tensors = tuple(
        Tensor(f"t{a}", f"l{a}", (f"l{b}",), sizes[a], sizes[b]) for a, b in itertools.pairwise(range(count))
    )
    costs = COSTS if rng.random() < 0.5 else ExecutorCosts()
    memory = 10**6 if rng.random() < 0.3 else rng.choice((1000, 1500)) * (2 if costs else 1)
    levels = (Level("server", 2, 1e3, 1e-3), Level("cluster", rng.randint(1, 3), rng.choice((30.0, 1e3)), 1e-2))
    cluster = Cluster("drawn", Device("chip", "cuda", memory), levels, executor=costs)
    accumulate = rng.choice((3, 4, 8, 9))
    return Problem(Profile(layers, tensors, 2), cluster, Options(schedule=schedule, accumulate=accumulate))


def document_of(seed: int) -> Document | None:
    """plan.json of a random problem as it is read from a file; None where no plan fits."""
    read: Document | None = json.loads(_written(seed))
    return read


@cache
def _written(seed: int) -> str:
    try:
        return json.dumps(
            plan_json.plan_document(solve(problem_of(seed), Settings(solver="dp", simulate=False, compare=False)))
        )
    except InfeasibleError:
        return "null"


def checked(document: Document, problem: Problem) -> CheckedPlan:
    """The results of all checks."""
    return check_readable_plan(Node(document, "plan.json"), problem.profile)


@pytest.mark.parametrize("seeds", first_few(range(400), 5))
def test_the_planners_figures_hold(seeds: range) -> None:
    found = 0
    for seed in seeds:
        problem = problem_of(seed)
        if (document := document_of(seed)) is not None:
            assert checked(document, problem).wrong is None, seed
            found += 1
    assert found > len(seeds) / 3


def leaves(node: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of every number and text below a node."""
    entries = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in entries:
        if isinstance(value, dict | list):
            yield from leaves(value)
        elif value is not None:
            yield node, key


@pytest.mark.parametrize("step", slow_but_for([3], [3, 1]))
def test_no_changed_figure_holds(step: int) -> None:
    """One figure in so many."""
    problem = problem_of(11)
    honest = document_of(11)
    assert honest is not None
    assert problem.cluster.executor
    for part in (*FIGURES, "bound_by"):
        changed = copy.deepcopy(honest)
        held = {part: changed["prediction"][part]}
        for holder, key in list(leaves(held))[::step]:
            value = holder[key]
            # A size is stated in whole bytes, and a time up to rounding.
            holder[key] = value + "x" if isinstance(value, str) else value * 1.01 + 2
            changed["prediction"][part] = held[part]
            assert checked(changed, problem).wrong is not None, (part, key)
            holder[key] = value
    assert checked(honest, problem).wrong is None


def _swap_workers(document: Document) -> None:
    stages = document["plan"]["stages"]
    stages[0]["workers"], stages[1]["workers"] = stages[1]["workers"], stages[0]["workers"]


def _raise_bound(document: Document) -> None:
    pace = document["prediction"]["minibatch_s"]
    document["bound_s"], document["gap"], document["status"] = pace, 0.0, "optimal"


def _certify(document: Document) -> None:
    document["certificate"] = {"pace": 1.0}


def _claim_proof(document: Document) -> None:
    document["verdict"]["proven"] = True


def _change_stage(**fields: Any) -> Callable[[Document], None]:
    def change(document: Document) -> None:
        document["plan"]["stages"][0] |= fields

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_swap_workers, "belongs on other workers"),
        (_change_stage(workers=[0, 1, 2]), "2 times"),
        (_change_stage(depth=99), "minibatches in flight"),
        (_change_stage(deferred=7), "minibatches in flight"),
        (_raise_bound, "the work alone allows"),
        (_claim_proof, "proven"),
        (_certify, "no certificate speaks"),
    ],
)
def test_a_forgery_is_named(change: Callable[[Document], None], words: str) -> None:
    problem = problem_of(1)
    document = document_of(1)
    assert document is not None
    change(document)
    wrong = checked(document, problem).wrong
    assert wrong is not None
    assert words in wrong.text
