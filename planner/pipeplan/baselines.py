"""What a plan is compared with: data parallelism, the best straight pipeline, and the same without pipelining."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pipeplan import cost
from pipeplan.cuts import Cuts
from pipeplan.evaluate import complain_of_memory, evaluate
from pipeplan.links import Links
from pipeplan.plan import Plan
from pipeplan.problem import Problem
from pipeplan.solvers import dp
from pipeplan.stages import one_stage


@dataclass(frozen=True)
class Baseline:
    """A plain way to use the cluster. `pace_s` is None where there is none that fits."""

    name: str
    pace_s: float | None
    config: str = ""
    remark: str = ""
    plan: Plan | None = None
    """What it does, stage by stage."""

    def gain(self, pace_s: float) -> float | None:
        """How many times faster a plan of that pace is."""
        return None if self.pace_s is None or pace_s == 0 else self.pace_s / pace_s


def compare(problem: Problem, cuts: Cuts) -> list[Baseline]:
    """The three baselines of a problem. Data parallelism is scored even where it does not fit, with a remark."""
    found = [data_parallelism(problem)]
    straight_problem = problem.straight()
    straight = dp.solve(straight_problem, cuts)
    if straight.plan is None:
        remark = "no straight pipeline fits in memory"
        return [
            *found,
            Baseline("best straight pipeline", None, "", remark),
            Baseline("model parallelism", None, "", remark),
        ]
    # A straight pipeline is one pipeline: with copies it would be replicated.
    pace = evaluate(straight.plan, problem).pace_s
    found.append(Baseline("best straight pipeline", pace, straight.plan.config, plan=straight.plan))
    unpipelined, remark = unpipelined_time(straight.plan, problem), "the same stages, not pipelined"
    return [*found, Baseline("model parallelism", unpipelined, straight.plan.config, remark, straight.plan)]


def data_parallelism(problem: Problem) -> Baseline:
    """The whole model on every worker; with a remark where it does not fit in memory."""
    parallel, name = one_stage(problem, problem.cluster.workers), "data parallelism"
    score = evaluate(parallel, problem)
    if not math.isfinite(score.pace_s):
        return Baseline(name, None, parallel.config, f"an update of {parallel.accumulate} minibatches is too short")
    remark = "" if score.fits else f"does not fit in memory: {complain_of_memory(score)}"
    return Baseline(name, score.pace_s, parallel.config, remark, parallel)


def unpipelined_time(plan: Plan, problem: Problem) -> float:
    """Seconds per minibatch of a straight plan with one minibatch under way: all compute and transfers in turn."""
    links = Links.of(problem.cluster)
    total = 0.0
    for index, stage in enumerate(evaluate(plan, problem).stages):
        total += stage.forward_s + stage.backward_s
        for size in (stage.boundary_bytes, stage.boundary_gradient_bytes):
            if size:
                both = plan.stages[index].workers + plan.stages[index + 1].workers
                total += float(cost.transfer_time(size, *links.sendrecv_among(both)))
    return total
