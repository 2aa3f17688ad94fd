"""The pace of a plan with everything charged, and the resources that determine it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeplan.checker.ddp_overlap import ddp_pace
from pipeplan.checker.document import FLUSHING, PlanDocument
from pipeplan.checker.figures import ROUNDING, StageFigures, copies_allreduce_s
from pipeplan.checker.loads import busiest
from pipeplan.checker.model import CheckedModel
from pipeplan.checker.pace import slowest_batches, slowest_resources, steady_pace, update_interval
from pipeplan.checker.shared_cards import card_loads, core_loads
from pipeplan.errors import InputError

AWAITED = "gradient synchronisation of stage 1, for which the next forward pass waits"
"""Name of the bound of plain data parallelism whose forward pass waits for the update."""


@dataclass(frozen=True)
class ChargedPace:
    """Paces in seconds per minibatch."""

    alone_s: float
    """Pace if every resource is used alone and no forward pass waits for an update."""
    pace_s: float
    """Pace with everything charged."""
    bound_by: frozenset[str]
    """Names of the resources that determine the pace; several where they are equal up to rounding."""


def charged_pace(document: PlanDocument, model: CheckedModel, figures: Sequence[StageFigures]) -> ChargedPace:
    """The pace of a plan. Raises an `InputError` where no pace can be kept or the shared cards cannot be added up."""
    among = copies_allreduce_s(document, model)
    if document.schedule in FLUSHING:
        alone = slowest_batches(document, model, figures)[0].total_s / update_interval(document)
    else:
        alone = steady_pace(document, figures, among)
    if math.isinf(alone):
        raise InputError("a stage has too few minibatches in flight to keep any pace")
    pace, candidates = alone, [(alone, slowest_resources(document, model, figures, among))]
    if document.options.contention:
        awaited = ddp_pace(document, model, figures)
        cards, cores = card_loads(document, figures), core_loads(document, figures)
        if cards is None:
            raise InputError("the replicas of the stages are too many to add up what each network card carries")
        candidates.append((awaited, frozenset({AWAITED})))
        if awaited > pace * (1 + ROUNDING):
            pace = awaited
        shared = max(load.seconds for load in (*cards, *cores))
        candidates.append((shared, busiest([*cards, *cores])))
        # A card with a single user has the load of that user, up to rounding.
        if shared > pace * (1 + ROUNDING):
            pace = shared
    bound_by = frozenset().union(*(names for time, names in candidates if time >= pace * (1 - 2 * ROUNDING)))
    return ChargedPace(alone, pace, bound_by)
