"""What workers are held up and idle by a plan, beside the replay of that plan."""

from __future__ import annotations

import pytest
from instances import random_instance, to_problem

from pipeplan.errors import InfeasibleError, InputError
from pipeplan.files import Node
from pipeplan.held import exposed_s, idle_s
from pipeplan.rendering.documents import plan_document
from pipeplan.simulation.engine import replay
from pipeplan.simulation.report import enough_minibatches, measure
from pipeplan.simulation.scenario import from_document
from pipeplan.solving import Outcome, Settings, solve

SEEDS = range(30)


def solved(seed: int) -> Outcome | None:
    try:
        return solve(to_problem(random_instance(seed)), Settings(solver="dp", certify=False))
    except (InfeasibleError, InputError):
        return None


@pytest.mark.slow
def test_a_replay_shows_the_same_shares_of_a_workers_time() -> None:
    """Where one pipeline trains and the replay keeps the predicted pace: without backward passes stages run ahead."""
    compared = replicated = 0
    for outcome in filter(None, map(solved, SEEDS)):
        scenario = from_document(Node(plan_document(outcome), "plan"))
        count = enough_minibatches(scenario)
        if count > 2000 or outcome.plan.copies > 1 or outcome.plan.inference:
            continue
        report = measure(scenario, replay(scenario, count), count)
        if report.ratio is None or abs(report.ratio - 1) > 1e-6:
            continue
        plan, problem, score = outcome.plan, outcome.problem, outcome.evaluation
        for index, stage in enumerate(report.stages):
            interval = plan.stages[index].replicas * score.pace_s
            held, idle = (found(plan, problem, score, index) / interval for found in (exposed_s, idle_s))
            assert held == pytest.approx(stage.synchronising, abs=1e-6)
            assert idle == pytest.approx(1 - stage.computing - stage.synchronising, abs=1e-6)
            replicated += stage.replicas > 1
        compared += 1
    assert compared >= 10
    assert replicated >= 5
