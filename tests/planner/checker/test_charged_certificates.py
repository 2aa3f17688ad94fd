"""Certificates that prove a step time with everything charged: honest ones hold, forged and changed ones do not."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import brute_force
import pytest
from checking import QUICK, Document, changed, findings, solved, written
from extents import first_few, slow_but_for
from instances import crowded_instance, drawn, mixed_instance, tied_instance, unequal_instance
from long_chains import chain

import pipeplan
from pipeplan.checker.verify import CheckResult
from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.planning import run_solvers
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer
from pipeplan.profile_data.profile import load_profile
from pipeplan.solvers.dp import certificate
from pipeplan.solvers.result import Status

SHARED = (17, 39, 45, 50, 51, 63)
"""Seeds of problems in which what is shared decides the step time."""
DRAWS = (mixed_instance, unequal_instance, crowded_instance)


def _optimality(document: Document, problem: Problem) -> CheckResult:
    """What the checker finds of the certificate. A complaint about plan.json itself counts as a refusal."""
    found = findings(document, problem.profile)
    return found.get("optimality") or next(iter(found.values()))


def _instance(seed: int) -> brute_force.Instance:
    """A problem in which everything is charged, under a schedule that certificates cover."""
    found = DRAWS[seed % 3](seed, layers=4)
    found = replace(found, contention=True, cores=(0, 0, 1, 2)[seed % 4])
    if found.kind == "vertical-sync":
        found = replace(found, schedule="1f1b-stashing", accumulate=None)
    return found


def _tied(seed: int) -> brute_force.Instance:
    """A problem in which several stages may share weights, with everything charged."""
    found = tied_instance(seed, layers=4, schedule=("1f1b-flush", "gpipe")[seed % 2])
    return replace(found, contention=True, cores=(0, 0, 1, 2)[seed % 4])


def _outcomes(
    seeds: Sequence[int], draw: Callable[[int], brute_force.Instance] = _instance
) -> Iterator[tuple[brute_force.Instance, Outcome]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_solvers, "why_infeasible", lambda *_: "")
        for seed in seeds:
            instance, problem = drawn(seed, draw)
            for _, outcome in solved([problem], replace(QUICK, certify=False)):
                yield instance, outcome


def _hiding(search: type[Any]) -> type[Any]:
    """A search that finds a plan, and hides it."""

    class Hiding(search):  # type: ignore[misc]
        def run(self) -> None:
            super().run()

    return Hiding


def _certified(outcome: Outcome, longer: float = 0.0) -> Document:
    """plan.json with a certificate of everything charged, whether or not sharing binds; none in it if that is unfit.

    Of a step time that is longer by a share, it is a forgery: all states below it, but for those that complete a plan.
    """
    problem = outcome.problem
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PlacementSearch", "PlacementFlushSearch") if longer else ():
            patch.setattr(certificate, name, _hiding(getattr(certificate, name)))
        cuts, step_time_s = enumerate_cuts(problem, 10_000), outcome.objective_s * (1 + longer)
        made = certificate.make_certificate(problem, cuts, step_time_s)
    return json.loads(json.dumps(written(outcome) | {"certificate": made.document}))


def _confirmed(seeds: Sequence[int], draw: Callable[[int], brute_force.Instance] = _instance) -> tuple[int, int, int]:
    """How many certificates hold of the oracle's step time, in how many of them sharing binds, and how many have a
    flush.
    """
    held = bound = flushing = 0
    for instance, outcome in _outcomes(seeds, draw):
        document = _certified(outcome)
        assert outcome.results[0].status == Status.OPTIMAL, instance
        if document["certificate"] is None:
            continue
        found = _optimality(document, outcome.problem)
        assert found.holds, (instance, found.text)
        assert document["certificate"]["bound_s"] == pytest.approx(brute_force.best(instance), rel=1e-6), instance
        held += 1
        bound += outcome.objective_s > outcome.evaluation.alone_s * (1 + 1e-6)
        flushing += outcome.problem.options.flushes
    return held, bound, flushing


FEW = [6, 7, 8, 9, 12, SHARED[0]]


@pytest.mark.parametrize("seeds", slow_but_for([FEW], [FEW, range(6), range(1000, 1360)]), ids=len)
def test_honest_certificates_hold_of_the_oracles_step_time(seeds: Sequence[int]) -> None:
    held, bound, flushing = _confirmed(seeds)
    assert held > len(seeds) / 2
    assert bound >= 1
    assert flushing >= 1


@pytest.mark.parametrize("seeds", first_few(range(180), 6))
def test_honest_certificates_hold_where_stages_share_weights(seeds: range) -> None:
    held, _, flushing = _confirmed(seeds, _tied)
    assert flushing == held > len(seeds) / 2


@pytest.mark.parametrize("seeds", first_few(range(30, 44), 7))
def test_a_certificate_of_a_step_time_that_a_plan_beats_fails(seeds: range) -> None:
    refuted = 0
    for instance, outcome in _outcomes(seeds):
        document = _certified(outcome, 1e-6)
        if document["certificate"] is not None:
            found = _optimality(document, outcome.problem)
            assert found.holds is False, instance
            refuted += 1
    assert refuted > len(seeds) / 3


@pytest.fixture(scope="module")
def binding() -> list[tuple[Problem, Document]]:
    """Problems in which sharing binds, with what `solve` writes."""
    return [(one := drawn(seed, _instance)[1], _written(one)) for seed in SHARED]


def _entries(document: Document) -> list[Document]:
    return [entry for entry in document["certificate"]["spaces"] if "states" in entry]


def _numbers(document: Document) -> Iterator[tuple[int, int, int]]:
    """Every number of every state, as the entry, the state, and the column."""
    for number, entry in enumerate(_entries(document)):
        for index, state in enumerate(entry["states"]):
            for column in range(len(state)):
                yield number, index, column


def test_no_state_can_be_left_out_nor_claim_less(binding: list[tuple[Problem, Document]]) -> None:
    raised = forgotten = 0
    for problem, document in binding:
        assert _optimality(document, problem).holds
        for number, entry in enumerate(_entries(document)):
            for index in range(len(entry["states"])):
                shorter = changed(document, lambda d: _entries(d)[number]["states"].pop(index))  # noqa: B023
                assert not _optimality(shorter, problem).holds
        for number, index, column in _numbers(document):
            value = _entries(document)[number]["states"][index][column]
            if column < 3 or not value:
                continue
            more = changed(document, lambda _: None)
            _entries(more)[number]["states"][index][column] *= 1 + 1e-6
            assert not _optimality(more, problem).holds, (index, column)
            raised += 1
        forgetful = copy.deepcopy(document)
        for entry in _entries(forgetful):
            for row in entry["states"]:
                row[4:] = [0.0 if isinstance(value, float) else value for value in row[4:]]
        forgotten += not _optimality(forgetful, problem).holds
    assert raised >= 10
    assert forgotten >= 3, "states without their loads lead to a plan"


def test_a_plan_whose_cards_are_shared_is_proven_to_be_the_fastest() -> None:
    problem = Problem(load_profile("gnmt8-v100"), pipeplan.cluster("A"))
    document = _written(problem)
    assert document["certificate"]["bound_s"] == pytest.approx(0.02286072, rel=1e-6)
    assert _optimality(document, problem).holds


def test_all_that_a_certificate_says_of_itself_is_checked(binding: list[tuple[Problem, Document]]) -> None:
    for problem, document in binding[::2]:

        def refused(change: Callable[[Document], object]) -> bool:
            forged = changed(document, lambda d: change(d["certificate"]))  # noqa: B023
            return _optimality(forged, problem).holds is False  # noqa: B023

        entry = next(number for number, one in enumerate(document["certificate"]["spaces"]) if "states" in one)
        assert refused(lambda found: found["spaces"].pop(entry))  # noqa: B023
        assert refused(lambda found: found["spaces"][entry].update(threshold_s=0))  # noqa: B023
        for share in (0.9, 1.1):

            def scale(found: Document, share: float = share) -> None:
                for one in found["spaces"]:
                    one["threshold_s" if "states" in one else "floor_s"] *= share

            assert refused(scale) or (share < 1 and problem.cluster.shared_cores), "what shared cores bound stands"
        assert refused(lambda found: found.update(bound_s=found["bound_s"] * 1.1))
        for column in range(len(_entries(document)[0]["states"][0])):
            assert refused(lambda found: [row.pop(column) for row in found["spaces"][entry]["states"]])  # noqa: B023


def _written(problem: Problem) -> Document:
    """What `solve` writes."""
    return written(solve(problem, Settings(solver="dp", simulate=False)))


def _with(problem: Problem, **options: Any) -> Problem:
    return replace(problem, options=replace(problem.options, **options))


@pytest.mark.parametrize("contention", [True, False])
def test_other_spaces_are_covered(contention: bool) -> None:
    """Servers that differ and parallel links; every number of stages where layers are pinned; every shape of a grid."""
    kinds = set()
    for seed in (3, 7, 8, 17, 30):
        draw = unequal_instance if seed % 2 else mixed_instance
        _, problem = drawn(seed, lambda number: replace(draw(number, layers=4), schedule="1f1b-stashing"))  # noqa: B023
        problem = _with(problem, contention=contention, accumulate=None)
        document = _written(problem)
        assert document["certificate"] is not None, document["certificate_note"]
        assert _optimality(document, problem).holds, seed
        kinds.add((problem.cluster.uniform, problem.options.boundary))
    assert kinds == {(False, "single"), (False, "parallel"), (True, "parallel")}
    pinned = _with(drawn(63, _instance)[1], pins=(("l1", 2),), max_stages=3, contention=contention)
    document = _written(pinned)
    assert [entry["stages"] for entry in _entries(document)] == [2, 3]
    assert _optimality(document, pinned).holds
    for number in (0, 1):
        fewer = changed(document, lambda d: d["certificate"]["spaces"].pop(number))  # noqa: B023
        assert "or not of all numbers of stages" in _optimality(fewer, pinned).text
    for seed in (2, 3):
        options = {"grid": True, "contention": contention, "stages": None, "max_workers": None, "pins": ()}
        problem = _with(drawn(seed, _instance)[1], **options)
        document = _written(problem)
        shapes = [(entry["stages"], entry["replicas"]) for entry in _entries(document)]
        assert (1, 1) in shapes
        assert len(shapes) >= 3
        assert _optimality(document, problem).holds
        for number in range(len(shapes)):
            fewer = changed(document, lambda d: d["certificate"]["spaces"].pop(number))  # noqa: B023
            other = changed(document, lambda d: d["certificate"]["spaces"][number].update(replicas=5))  # noqa: B023
            assert not _optimality(fewer, problem).holds
            assert not _optimality(other, problem).holds


def test_loads_of_tiny_stages_are_rounded_like_the_sums_that_they_come_of() -> None:
    """Three workers on two cores. Layers of very different size, so that a load is a small difference of large sums."""
    device, inside = Device("cpu", "cpu", 2**34, cores=2), Level("server", 3, 3e9, 2e-5)
    for seed in range(4):
        rng = random.Random(seed)
        times = [rng.uniform(0.5, 1.5) * 10.0 ** -rng.randint(2, 5) for _ in range(18)]
        profile = chain([Layer(f"l{index}", time, 2 * time, 1000, 10) for index, time in enumerate(times)], 8, 4)
        problem = Problem(profile, Cluster("local", device, (inside,)), Options(overlap=0.0))
        document = _certified(solve(problem, replace(QUICK, certify=False)))
        assert document["certificate"] is not None
        assert _optimality(document, problem).holds, (seed, _optimality(document, problem).text)
