"""No simulated plan is faster than the bound of the relaxation."""

from __future__ import annotations

import pytest
from extents import first_few
from flush_plans import drawn_flush_plans

from pipeplan.cost.evaluate import evaluate
from pipeplan.plan.schedules import FLUSH, ZERO_BUBBLE
from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.simulation.from_plan import scenario_of_plan
from pipeplan.simulation.simulate import simulated_update_s
from pipeplan.solvers.update_bound import UpdateBound

AT_ONCE = 25


@pytest.mark.parametrize("part", first_few(range(20), 4))
@pytest.mark.parametrize("schedule", [FLUSH, ZERO_BUBBLE])
def test_no_simulated_update_is_faster_than_the_relaxation_allows(schedule: str, part: range) -> None:
    for number in part:
        for seed, plan, problem in drawn_flush_plans(schedule, range(number * AT_ONCE, (number + 1) * AT_ONCE)):
            if len(plan.stages) > 1:
                simulated_s = simulated_update_s(scenario_of_plan(plan, problem, evaluate(plan, problem)))
                bound = UpdateBound(problem, enumerate_cuts(problem, 1000), splits=schedule == ZERO_BUBBLE)
                assert bound.may_fit(simulated_s * (1 + 1e-9)), seed
