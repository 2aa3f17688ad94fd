"""What workers are held up and idle by a plan, beside the replay of that plan."""

from __future__ import annotations

import pytest
from instances import random_instance, to_problem

from pipeplan.cost.evaluate import exposed_allreduce_per_minibatch_s, idle_per_minibatch_s
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.rendering.plan_json import plan_document
from pipeplan.simulation.engine import simulate_schedule
from pipeplan.simulation.metrics import enough_minibatches, summarise_simulation
from pipeplan.simulation.scenario import scenario_from_document
from pipeplan.util.files import Node

SEEDS = range(30)


def solved(seed: int) -> Outcome | None:
    try:
        return solve(to_problem(random_instance(seed)), Settings(solver="dp", certify=False, simulate=False))
    except (InfeasibleError, InputError):
        return None


@pytest.mark.slow
def test_a_replay_shows_the_same_shares_of_a_workers_time() -> None:
    """Where one pipeline trains and the replay keeps the predicted step time: without backward passes stages
    run ahead.
    """
    compared = replicated = 0
    for outcome in filter(None, map(solved, SEEDS)):
        scenario = scenario_from_document(Node(plan_document(outcome), "plan"))
        count = enough_minibatches(scenario)
        if count > 2000 or outcome.plan.copies > 1 or outcome.plan.inference:
            continue
        report = summarise_simulation(scenario, simulate_schedule(scenario, count), count)
        if report.ratio is None or abs(report.ratio - 1) > 1e-6:
            continue
        plan, problem, score = outcome.plan, outcome.problem, outcome.evaluation
        for index, stage in enumerate(report.stages):
            interval = plan.stages[index].replicas * score.step_time_s
            held, idle = (
                found(plan, problem, score, index) / interval
                for found in (exposed_allreduce_per_minibatch_s, idle_per_minibatch_s)
            )
            assert held == pytest.approx(stage.synchronising, abs=1e-6)
            assert idle == pytest.approx(1 - stage.computing - stage.synchronising, abs=1e-6)
            replicated += stage.replicas > 1
        compared += 1
    assert compared >= 10
    assert replicated >= 5
