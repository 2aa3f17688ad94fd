"""The step time of a plan, implemented independently from docs/cost-model.md.

In the steady state, the step time is the time of the slowest resource. Under a flush, it is the time of a batch divided
by the number of its minibatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeplan.checker.batch import Load, boundary_name, busiest, depth_name, slowest_batches
from pipeplan.checker.data_parallel import ddp_step_time
from pipeplan.checker.document import DOUBLE_BUFFERED, PlanDocument
from pipeplan.checker.figures import StageFigures, copies_allreduce_s
from pipeplan.checker.formulas import ROUNDING, group_wait, in_flight_depth, overlapped_s
from pipeplan.checker.model import CheckedModel
from pipeplan.checker.shared_cards import card_loads, core_loads
from pipeplan.errors import InputError

AMONG_COPIES = "synchronisation among the copies of the pipeline"
AWAITED = "gradient synchronisation of stage 1, for which the next forward pass waits"
"""Name of the bound of a data-parallel plan whose forward pass waits for the update."""


@dataclass(frozen=True)
class ChargedStepTime:
    """Step times in seconds per minibatch."""

    step_time_s: float
    """Step time with everything charged."""
    bound_by: frozenset[str]
    """Names of the resources that determine the step time; several if they are equal up to rounding."""


def charged_step_time(document: PlanDocument, model: CheckedModel, figures: Sequence[StageFigures]) -> ChargedStepTime:
    """The step time of a plan. Raises an `InputError` if its depths sustain no step time, or if the loads of shared
    cards cannot be added up.
    """
    step_time, names = _step_time_alone(document, model, figures)
    if math.isinf(step_time):
        raise InputError("a stage has too few minibatches in flight to keep any step time")
    candidates = [(step_time, names)]
    if document.options.contention:
        awaited = ddp_step_time(document, model, figures[0].pass_s, figures[0].group_s)
        shared = [*card_loads(document, figures), *core_loads(document, figures)]
        candidates += [(awaited, frozenset({AWAITED})), (max(load.seconds for load in shared), busiest(shared))]
        # A card with only one user has the same load as the user, up to rounding.
        step_time = max([step_time, *(time for time, _ in candidates if time > step_time * (1 + ROUNDING))])
    bound_by = frozenset().union(*(names for time, names in candidates if time >= step_time * (1 - 2 * ROUNDING)))
    return ChargedStepTime(step_time, bound_by)


def _step_time_alone(
    document: PlanDocument, model: CheckedModel, figures: Sequence[StageFigures]
) -> tuple[float, frozenset[str]]:
    """(step time if every resource has one user and no forward pass waits for an update, the resources that determine
    it).
    """
    interval = document.update_interval(document.copies)
    if document.flushes:
        batches = slowest_batches(document, model, figures)
        return batches[0].total_s / interval, frozenset().union(*(parts.causes(len(figures)) for parts in batches))
    among = copies_allreduce_s(document, model)
    loads = [Load(load.seconds / document.copies, load.name) for load in _steady_loads(document, figures, among)]
    slowest = max(load.seconds for load in loads)
    step_time = float(overlapped_s(slowest, among / interval, document.options.overlap))
    return step_time, busiest([*loads, Load(among / interval, AMONG_COPIES)])


def _steady_loads(document: PlanDocument, figures: Sequence[StageFigures], among_s: float) -> list[Load]:
    """The resources of one copy of the pipeline, each with its time for a minibatch of this copy.

    `among_s`: time of one all-reduce among the copies.
    """
    loads = []
    for index, stage in enumerate(figures):
        # With more copies than minibatches, some copy has no minibatch in an update. No depth then passes
        # `_depth_step_time`.
        interval = max(1, document.share(document.copies)) if document.accumulates else stage.replicas
        compute, exchange = stage.pass_s / stage.replicas, stage.allreduce_s / interval
        both = float(overlapped_s(compute, exchange, document.options.overlap))
        if compute >= exchange * (1 - ROUNDING):
            loads.append(Load(both, f"compute of stage {index + 1}"))
        if exchange >= compute * (1 - ROUNDING):
            loads.append(Load(both, f"gradient synchronisation of stage {index + 1}"))
        loads.append(Load(stage.busier_s / stage.lanes, boundary_name(index)))
        if not document.inference:
            loads.append(Load(_depth_step_time(document, figures, index, among_s), depth_name(index)))
    return loads


def _depth_step_time(document: PlanDocument, figures: Sequence[StageFigures], index: int, among_s: float) -> float:
    """Step time of one copy that a depth sustains. Under 2BW it is at least the step time for which two weight versions
    are enough.
    """
    step_time = _sustained(document, figures, index)
    if document.schedule == DOUBLE_BUFFERED:
        stage = figures[index]
        spare = document.share(document.copies) - stage.depth * stage.replicas
        late = (stage.allreduce_s + among_s) / (spare + 1 / document.copies) if spare >= 0 else math.inf
        step_time = max(step_time, late)
    return step_time


def _sustained(document: PlanDocument, figures: Sequence[StageFigures], index: int) -> float:
    """The smallest step time for which the depth formula gives at most the stage's depth; infinite if there is none."""
    if index + 1 == len(figures):
        return 0.0
    current, following = figures[index : index + 2]

    def wait(stage: StageFigures, step_time: float) -> float:
        if document.accumulates:
            return 0.0
        return float(group_wait(stage.group_s, step_time, stage.replicas, document.copies))

    def suffices(step_time: float) -> bool:
        demand = following.depth * following.replicas + wait(following, step_time)
        depth = in_flight_depth(demand, wait(current, step_time), current.transfer_s, step_time, current.replicas)
        return bool(depth <= current.depth)

    return _smallest(suffices)


def _smallest(holds: Callable[[float], bool]) -> float:
    """The smallest positive number for which a monotone predicate holds, by bisection.

    0 if it holds for all numbers, infinity if it holds for none.
    """
    low, high = 1e-30, 1e30
    if holds(low):
        return 0.0
    if not holds(high):
        return math.inf
    while high > low * (1 + 1e-14):
        middle = math.sqrt(low * high)
        if not low < middle < high:
            break
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
