"""`--schedule auto --staleness none` compares the synchronous schedules by simulation, and says what each costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from long_chains import long_chain

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.planning.choose_schedule import TAKEN, choose_schedule
from pipeplan.planning.compare_flushes import compare_flushes, taken
from pipeplan.planning.fast import best_in_time
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.util.deadline import NO_DEADLINE, Deadline

CLUSTER = Cluster("four", Device("d", "cuda", 2**40), (Level("server", 4, 1e12),))


def profile() -> Profile:
    """Equal layers, as a schedule's own formula has them."""
    chain = long_chain(16)
    alike = tuple(replace(layer, forward_s=1e-3, backward_s=2e-3) for layer in chain.layers)
    return replace(chain, layers=alike)


def straight(**options: object) -> Options:
    return Options(schedule="1f1b-flush", max_replicas=1, allow_copies=False, **options)  # type: ignore[arg-type]


def test_the_bubbles_of_equal_stages_are_those_of_the_formulas() -> None:
    problem = Problem(profile(), CLUSTER, straight(accumulate=8, stages=4))
    best, _ = best_in_time(problem, 1000, NO_DEADLINE)
    assert best is not None
    usual, *others = compare_flushes(problem, best.plan, Deadline.after(60))
    found = {one.plan.schedule: one.bubble for one in (usual, *others)}
    assert found["1f1b-flush"] == pytest.approx(3 / 11, abs=1e-3)
    assert 0.05 < found["zb-h1"] < 3 / 27 + 1e-3  # of one update alone; the next one begins a little earlier
    # Messages take a little; interleaving has (p - 1) / v more to wait for.
    assert found["interleaved-1f1b"] == pytest.approx(3 / 4 / (8 + 3 / 4), abs=5e-3)
    assert found["zb-v"] < 0.01
    winner = taken([usual, *others])
    assert winner is not None
    assert winner.plan.schedule == "zb-v"
    assert winner.text(usual).startswith("bubble 0% instead of 27%, ")


def test_the_choice_takes_what_is_simulated_as_faster() -> None:
    options = Options(max_replicas=1, allow_copies=False)
    problem, choices = choose_schedule(profile(), CLUSTER, options, 8, "none", 1000, Deadline.after(60))
    assert problem.options.schedule == "zb-v"
    notes = [choice.note for choice in choices if choice.note]
    assert len(notes) == 4
    assert sum(note.startswith(TAKEN) for note in notes) == 1
    stale = choose_schedule(profile(), CLUSTER, options, 8, "bounded", 1000, Deadline.after(60))[1]
    assert not any(choice.note for choice in stale)


def test_one_stage_has_no_bubble_to_shorten() -> None:
    problem = Problem(profile(), CLUSTER, straight(accumulate=8, stages=1))
    best, _ = best_in_time(problem, 1000, NO_DEADLINE)
    assert best is not None
    assert compare_flushes(problem, best.plan, NO_DEADLINE) == []
    assert taken([]) is None
