"""The simulator's input for a plan that is not written yet: its scenario, and the order of its passes."""

from __future__ import annotations

from pipeplan.cluster_data.links import Links
from pipeplan.cost.ddp_overlap import ddp_exposed_allreduce_s, flush_exposed_allreduce_s, waits_for_allreduce
from pipeplan.cost.evaluate import Evaluation
from pipeplan.cost.stage_times import awaited_exchange_s, group_allreduce_time
from pipeplan.cost.virtual_stages import PLACEMENTS
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import SPLITTING
from pipeplan.problem.problem import Problem
from pipeplan.simulation.scenario import PredictedStage, Scenario, assemble_scenario
from pipeplan_launch.plan.schedule import SCHEDULES, ActionKind, StageShape


def scenario_of_plan(plan: Plan, problem: Problem, score: Evaluation) -> Scenario:
    """The scenario of a plan with this score, as its plan.json would give it (`scenario_from_document`)."""
    figures, busy = stage_figures(plan, problem, score), problem.profile.provenance.processes
    return assemble_scenario(plan, problem.cluster, figures, problem.options, score.step_time_s, busy)


def stage_figures(plan: Plan, problem: Problem, score: Evaluation) -> list[PredictedStage]:
    """The figures of all stages of a plan with this score, as plan.json has them and the simulator needs them."""
    links, figures = Links.of(problem.cluster), []
    for index, cost in enumerate(score.stages):
        before = score.stages[index - 1] if index else None
        figures.append(
            PredictedStage(
                forward_s=cost.layers_forward_s,
                backward_s=cost.layers_backward_s,
                update_s=cost.update_s,
                weights_s=cost.weights_s,
                split_s=problem.profile.split_share * cost.layers_backward_s if cost.weights_s else 0.0,
                executor_s=cost.executor_s,
                sync_s=group_allreduce_time(plan, problem, links, index) + awaited_exchange_s(plan, problem, index),
                exposed_sync_s=_exposed_sync_s(plan, problem, links, index),
                receive_bytes=before.boundary_bytes if before else 0,
                send_bytes=cost.boundary_bytes,
                send_gradient_bytes=before.boundary_gradient_bytes if before else 0,
                receive_gradient_bytes=cost.boundary_gradient_bytes,
                parameter_bytes=cost.parameter_bytes,
                minibatch_bytes=round(cost.minibatch_bytes),
                memory_bytes=round(cost.memory_bytes),
            )
        )
    return figures


def _exposed_sync_s(plan: Plan, problem: Problem, links: Links, index: int) -> float | None:
    """The part of a stage's all-reduce that remains after the backward pass in which it starts; None if it starts
    later."""
    if waits_for_allreduce(plan) and problem.options.contention:
        return ddp_exposed_allreduce_s(plan, problem, links)
    return flush_exposed_allreduce_s(plan, problem, links, index)


def pass_order(plan: Plan, stage: int) -> list[tuple[str, int]]:
    """The passes of one update on the first replica of a stage, as (kind, minibatch), for a synchronous schedule.

    The kinds are `F` and `B`. A stage that defers gradients of weights has `I` (inputs) and `W` instead of `B`. The
    minibatches of the replica are counted from 0. All replicas with the same number of minibatches run the same passes.
    """
    devices = [plan.device_of(index) for index in range(len(plan.stages))]
    shapes = [
        StageShape(stage.replicas, stage.depth, plan.accumulate, stage.deferred, device)
        for stage, device in zip(plan.stages, devices, strict=True)
    ]
    # Without accumulation, a plan of one stage makes one update for a minibatch of each replica.
    minibatches = plan.accumulate or shapes[0].replicas
    stream = SCHEDULES[plan.schedule].stream(shapes, stage, 0, minibatches)
    kinds = {ActionKind.FORWARD: "F", ActionKind.BACKWARD: "B"}
    if shapes[stage].deferred:
        kinds |= {ActionKind.BACKWARD: "I", ActionKind.WEIGHTS: "W"}
    return [(kinds[one.kind], one.index // shapes[stage].replicas) for one in stream if one.kind in kinds]


def device_orders(plan: Plan) -> list[list[tuple[int, str, int]]]:
    """The passes of one update on the first replica of every position, for a plan whose workers run several stages.

    A pass is (stage, kind, minibatch), with the kinds of `pass_order`.
    """
    assert plan.accumulate is not None
    placement, devices = PLACEMENTS[plan.schedule], len(plan.devices)
    kinds = {"F": "F", "B": "I", "W": "W"} if plan.schedule in SPLITTING else {"F": "F", "B": "B"}
    orders = []
    for device in range(devices):
        own = placement.stages_of(device, devices, len(plan.stages))
        passes = placement.passes(device, devices, len(own), -(-plan.accumulate // plan.stages[0].replicas))
        orders.append([(own[chunk], kinds[kind], minibatch) for kind, chunk, minibatch in passes])
    return orders
