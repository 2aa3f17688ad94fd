"""`pipeplan check` of plans and certificates that hold, that are forged, or that speak of plans outside of a proof."""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from brute_force import Instance
from checking import Document, changed, fault, findings, places, solved, written
from commandline import Run
from extents import first_few
from instances import drawn, mixed_instance, random_instance, unequal_instance
from long_chains import chain
from reported import branching, small_cluster

from pipeplan.checker.document import PlanDocument
from pipeplan.checker.structure import outside_space
from pipeplan.checker.verify import CheckDocument
from pipeplan.cost import depths
from pipeplan.cost.evaluate import evaluate
from pipeplan.planning.figure import figure_of
from pipeplan.planning.outcome import Outcome, state_verdict
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.solvers.result import Status
from pipeplan.util.deadline import NO_DEADLINE
from pipeplan.util.files import Node

Case = tuple[Problem, Document]


def _spaces(document: Document) -> list[Document]:
    return [space for space in document["certificate"]["spaces"] if "states" in space]


def _tampered(document: Document) -> Iterator[tuple[str, Document]]:
    """Copies of a plan.json with one state changed so that it says less than it should."""
    for number, space in enumerate(_spaces(document)):
        for index, (_, first, _, demand, *_) in enumerate(space["states"]):
            for what in ("deleted", "demand", "first"):
                forged = copy.deepcopy(document)
                states = _spaces(forged)[number]["states"]
                if what == "deleted":
                    del states[index]
                elif what == "demand":
                    states[index][3] = demand * (1 + 1e-6)
                else:
                    states[index][1] = first - 1
                yield what, forged


@pytest.mark.parametrize("seeds", first_few(range(40), 16))
def test_no_state_can_be_left_out_or_say_less(seeds: range) -> None:
    """Of problems with constraints, in which memory and synchronisation often bind."""
    refuted, tried = Counter[str](), Counter[str]()
    draw = partial(mixed_instance, layers=5, schedule="1f1b-stashing")
    problems = [drawn(seed, draw)[1] for seed in seeds]
    for problem, outcome in solved(problems, Settings(solver="dp")):
        document = written(outcome)
        limited = problem.options.memory and problem.training
        for what, forged in _tampered(document) if document["certificate"] is not None else ():
            # What is demanded in front of everything, or where depths take no memory, is of no account.
            counts = limited and any(a != b for a, b in zip(_demands(document), _demands(forged), strict=False))
            if what == "demand" and not counts:
                continue
            tried[what] += 1
            refuted[what] += findings(forged, problem.profile)["optimality"].holds is False
    # The solver writes few states that others imply.
    assert refuted["demand"] > 0
    assert tried.total() > len(seeds)
    assert all(refuted[what] >= 0.8 * count for what, count in tried.items()), (refuted, tried)


def _demands(document: Document) -> list[float]:
    return [state[3] for space in _spaces(document) for state in space["states"]]


@pytest.fixture(scope="module")
def case() -> Case:
    """The solver's plan of five layers in three stages, 1-2-1, on two servers of two, with a certificate."""
    _, problem = drawn(2710, lambda seed: random_instance(seed, layers=5))
    ((_, outcome),) = solved([problem], Settings(solver="dp"))
    document = written(outcome)
    assert document["plan"]["config"] == "1-2-1"
    return problem, document


def _refused(case: Case, change: Callable[[Document], object]) -> str:
    """What is found wrong with a plan once it is changed."""
    wrong = fault(changed(case[1], change), case[0].profile)
    assert wrong, "nothing is found wrong"
    return wrong


def test_every_stated_figure_is_checked(case: Case) -> None:
    document = changed(case[1], lambda _: None)
    leaves = [
        (one, key) for one, key in places(document["prediction"]) if isinstance(one[key], float | int) and one[key]
    ]
    assert len(leaves) > 12
    for holder, key in leaves:
        value, holder[key] = holder[key], holder[key] * 1.001 + (2 if "bytes" in key else 0)
        assert key in (wrong := fault(document, case[0].profile)) or "certificate" in wrong
        holder[key] = value


def _stages(document: Document) -> list[Document]:
    found: list[Document] = document["plan"]["stages"]
    return found


def test_structure_and_constraints_are_checked(case: Case) -> None:
    changes: tuple[tuple[Callable[[Document], object], str], ...] = (
        (lambda d: _stages(d)[0]["layers"].append(_stages(d)[1]["layers"][0]), "times"),
        (lambda d: _stages(d)[0]["layers"].pop(), "profile but not the plan"),
        (lambda d: _stages(d)[0]["layers"].append("l9"), "plan but not the profile"),
        (lambda d: _stages(d).reverse(), "comes later"),
        (lambda d: _stages(d)[0]["workers"].append(3), "worker 3 is in the plan 2 times"),
        (lambda d: _stages(d)[0]["workers"].append(4), "workers 0 to 3"),
        (lambda d: _stages(d)[0]["workers"].clear(), "on 0 workers"),
        (lambda d: _stages(d).append(_stages(d)[0] | {"layers": [], "workers": []}), "has no layers"),
        (lambda d: _stages(d).clear(), "has no stages"),
    )
    for change, complaint in changes:
        assert complaint in _refused(case, change)
    for options, complaint in (
        ({"stages": 2}, "2 stages were asked for, the plan has 3"),
        ({"max_stages": 1}, "at most 1 stages"),
        ({"max_replicas": 1}, "at most 1 replicas"),
        ({"max_workers": 3}, "at most 3 workers"),
        ({"pins": [["l0", 3]]}, "layer 'l0' was asked for in stage 3, the plan has it in stage 2"),
        ({"together": [["l0", "l4"]]}, "must be together"),
        ({"together": [["l0", "nosuch"]]}, "does not have: 'nosuch'"),
    ):
        assert complaint in _refused(case, lambda d, options=options: d["options"].update(options))


def test_memory_must_suffice_and_the_cluster_be_the_one_planned_for(case: Case) -> None:
    assert "digests differ" in _refused(case, lambda d: d["cluster"]["device"].update(memory_bytes=10))
    cluster, document = case[0].cluster, case[1]
    most = max(stage["memory_bytes"] for stage in document["prediction"]["stages"])

    def memory(size: int, reserve: float = 0.0) -> str:
        """What is found on devices of another size, of which a share is reserved."""
        other = replace(cluster, device=replace(cluster.device, memory_bytes=size, memory_reserve=reserve))
        on_other = document | {"cluster": other.to_json() | {"digest": other.digest()}}
        return findings(on_other, case[0].profile)["memory"].line

    assert "memory: wrong, stage 1 needs" in memory(10)
    assert "memory: ok" in memory(most)
    assert "memory: wrong, stage " in memory(most, reserve=0.1)


def test_a_certificate_speaks_of_every_space_of_plans(case: Case) -> None:
    def spaces(document: Document) -> list[Document]:
        found: list[Document] = document["certificate"]["spaces"]
        return found

    assert [space["copies"] for space in spaces(case[1])] == [1, 2]
    assert "floor_s" in spaces(case[1])[1]
    changes: tuple[tuple[Callable[[Document], object], str], ...] = (
        (lambda d: spaces(d).pop(), "nothing is claimed of 2 copies"),
        (lambda d: spaces(d).pop(0), "nothing is claimed of one pipeline"),
        (lambda d: spaces(d).append(spaces(d)[0]), "listed twice"),
        (lambda d: spaces(d)[1].update(copies=4), "no such space"),
        (lambda d: spaces(d)[1].update(floor_s=1e6), "synchronise in"),
        (lambda d: spaces(d)[1].update(floor_s=1.0), "it shows only"),
        (lambda d: spaces(d)[0].update(threshold_s=1.0), "it shows only"),
        (lambda d: spaces(d)[0].update(threshold_s=0), "a threshold is 0"),
        (lambda d: d.update(bound_s=d["bound_s"] * 1.01), "bound_s: stated"),
        (lambda d: d["certificate"].update(tolerance=0.01), "at most 1e-06"),
    )
    for change, complaint in changes:
        assert complaint in _refused(case, change)


def test_a_certificate_may_claim_a_bound_below_the_plan(case: Case) -> None:
    problem, document = case
    lower = copy.deepcopy(document)
    lower["certificate"]["bound_s"] = lower["bound_s"] = document["prediction"]["minibatch_s"] * 0.9
    for space in _spaces(lower):
        space["threshold_s"] *= 0.9
    found = findings(lower, problem.profile)["optimality"]
    assert found.holds
    assert "so none is more than 11.1% faster" in found.text


def test_states_must_be_states(case: Case) -> None:
    def change(key: str, value: object) -> str:
        return _refused(case, lambda d: d["certificate"]["spaces"][0].update({key: value}))

    first = case[1]["certificate"]["spaces"][0]
    start = next(state for state in first["states"] if first["cuts"][state[0]] == f"{2**5 - 1:x}")
    assert "nothing is placed yet is missing" in change("states", [row for row in first["states"] if row != start])
    for cut in ("10", "zz", "ffff"):
        assert "is no cut of the model" in change("cuts", [*first["cuts"], cut])
    for row, complaint in (
        ([9, 1, 0, 0.0], "beyond the"),
        ([0, 4, 0, 0.0], "beyond the cluster"),
        ([0, 1, 9, 0.0], "beyond the cluster"),
        ([0, 1, 0, 0.0], "beyond the cluster"),
        ([0, 1, 1, -1.0], "negative"),
        ([0, 1.5, 1, 0.0], "fractional"),
        ([0, 1, 0, 1e300], "excessive"),
        ([0, 1, 0, 10**400], "excessive"),
        ([0, 1, 0, math.nan], "excessive"),
        ([0, 1, 0, "x"], "only numbers"),
        ([0, 1, 1], "states of 4 numbers"),
        ("text", "states of 4 numbers"),
    ):
        assert complaint in change("states", [*first["states"], row])
    assert "expected a list" in change("states", 7)


def _confirmed(seeds: range, draw: Callable[[int], Instance]) -> int:
    """How many certificates hold, of the plans that the solver finds; none of the plans may have anything wrong."""
    certified = 0
    problems = [(seed, drawn(seed, draw)[1]) for seed in seeds]
    charged = [replace(one, options=replace(one.options, contention=seed % 2 == 0)) for seed, one in problems]
    for problem, outcome in solved(charged, Settings(solver="dp")):
        document = written(outcome)
        assert fault(document, problem.profile) == "", problem
        found = findings(document, problem.profile)["optimality"]
        assert (document["certificate"] is None) == (found.holds is None)
        certified += document["certificate"] is not None
    return certified


@pytest.mark.parametrize("draw", [random_instance, mixed_instance, unequal_instance])
@pytest.mark.parametrize("seeds", first_few(range(4, 604), 4))
def test_what_the_solver_writes_is_confirmed(draw: Callable[[int], Instance], seeds: range) -> None:
    assert _confirmed(seeds, draw) >= 2 or draw is unequal_instance


def test_a_step_time_at_which_a_depth_changes_is_no_cause_for_a_larger_depth() -> None:
    # With one more minibatch in flight the plan of this problem would not fit in memory.
    _confirmed(range(1979, 1980), mixed_instance)


def test_the_command_prints_a_line_for_each_check_and_refuses_in_one(run: Run) -> None:
    layers = [Layer("a", 1.0, 2.0, 100, 10), Layer("b", 0.5, 1.0, 0, 4), Layer("c", 0.25, 0.5, 40, 6)]
    chain(layers, [8, 4], 4, model_name="small").save(Path("profile.json"))
    asked = ("solve", "--cluster", "C", "--microbatch", "8", "--schedule", "1f1b-stashing", "--solver", "dp")
    assert run(*asked).code == 0
    done = run("check")
    assert done.code == 0
    assert [line.split(":")[0] for line in done.out.splitlines()] == [
        *("structure", "constraints", "formulas", "step time", "run", "stages", "memory", "description"),
        *("optimality", "verdict"),
    ]
    assert "wrong" not in done.out
    found = json.loads(run("check", "plan/plan.json", "--profile", "profile.json", "--json").out)
    assert msgspec.convert(found, CheckDocument).correct
    assert [claim["holds"] for claim in found["claims"]] == [True] * 10
    path = Path("plan/plan.json")
    document = json.loads(path.read_text())
    document["prediction"]["minibatch_s"] *= 0.99
    path.write_text(json.dumps(document))
    done = run("check")
    assert done.code == 2
    assert "step time: wrong" in done.out
    assert done.err.startswith("error: plan/plan.json is wrong: formulas: ")
    assert len(done.err.splitlines()) == 1
    found = json.loads(run("check", "--json").out)
    assert (found["correct"], found["shown"], found["claims"][2]["holds"]) == (False, None, False)
    Path("other.json").write_text(Path("profile.json").read_text().replace("small", "other"))
    assert "their digests differ" in run("check", "--profile", "other.json").err
    Path("profile.json").unlink()
    assert "name it with --profile" in run("check").err
    assert "cannot read" in run("check", "nowhere").err


# The searched space.


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    """A plan of several stages that is proven, and as fast in the opposite order of its workers."""
    return solve(Problem(branching(4), small_cluster(), Options()))


@pytest.fixture(scope="module")
def document(outcome: Outcome) -> Document:
    return written(outcome)


def _why(document: Document, *workers: Any, copies: int = 1) -> str:
    """Why stages on these workers of the cluster lie outside the searched space."""
    stages = [document["plan"]["stages"][0] | {"layers": ["a"], "workers": list(one)} for one in workers]
    other = document | {"plan": document["plan"] | {"copies": copies, "stages": stages}}
    other["prediction"] = {"minibatch_s": 1.0}
    return outside_space(PlanDocument.of(Node(other, "plan.json")))


def test_stages_follow_the_order_of_the_workers(document: Document) -> None:
    for workers, copies, why in (
        ([(0, 1, 2), (3,)], 1, ""),
        ([(1,), (3,)], 1, ""),
        ([(3,), (0, 1, 2)], 1, "stage 2 is on workers before those of stage 1"),
        ([(0, 2), (3,)], 1, "stage 1 is not on consecutive workers in increasing order"),
        ([(1, 0), (3,)], 1, "stage 1 is not on consecutive workers in increasing order"),
        ([(0, 2), (1, 3)], 2, ""),
        ([(0, 3), (1, 2)], 2, "stage 2 is on workers before"),
        ([(0, 1), (2, 3)], 2, "copy 1 of the pipeline|copy 2 of the pipeline"),
        ([(0, 1, 2)], 3, "there are no 3 components in a row"),
    ):
        found = _why(document, *workers, copies=copies)
        assert any(found.startswith(part) and bool(found) is bool(part) for part in why.split("|")), (workers, found)


def _reversed(outcome: Outcome) -> Outcome:
    """The same stages on workers in the opposite order, scored and described anew."""
    problem, last = outcome.problem, outcome.problem.cluster.workers - 1
    stages = tuple(
        replace(stage, workers=tuple(sorted(last - worker for worker in stage.workers)))
        for stage in outcome.plan.stages
    )
    plan = depths.assign_depths(replace(outcome.plan, stages=stages), problem, outcome.objective_s)
    score = evaluate(plan, problem)
    figure = figure_of(plan, score, problem, NO_DEADLINE)
    verdict = state_verdict(problem, figure.step_s, outcome.bound_s, outcome.results)
    return replace(outcome, plan=plan, evaluation=score, verdict=verdict, figure=figure)


def test_the_claim_of_a_plan_outside_is_refused_and_its_cost_is_checked(outcome: Outcome, document: Document) -> None:
    profile, outside = outcome.problem.profile, _reversed(outcome)
    assert outside.objective_s == pytest.approx(outcome.objective_s)
    assert findings(document, profile)["optimality"].holds
    claimed = written(outside)
    assert [one.what for one in findings(claimed, profile).values() if one.holds is False] == ["optimality"]
    assert "the plan lies outside the searched space" in fault(claimed, profile)
    # Without a certificate a status of its own is a claim as well; a plan that claims neither passes.
    assert fault(claimed | {"certificate": None}, profile)
    results = (replace(outside.results[0], status=Status.FEASIBLE, bound_s=0.0),)
    verdict = state_verdict(outside.problem, outside.predicted_s, 0.0, results)
    modest = written(replace(outside, bound_s=0.0, results=results, verdict=verdict))
    assert fault(modest, profile)
    assert fault(modest | {"certificate": None}, profile) == ""
