"""Whether a plan lies in the searched space, of which alone a certificate speaks.

docs/cost-model.md, "The space of plans", defines it: the stages of a pipeline follow the order of the worker numbers,
each on consecutive workers, and copies of a pipeline lie in the same places of consecutive components of one level.
"""

from __future__ import annotations

from pipeplan.checker.document import PlanDocument


def outside_space(document: PlanDocument) -> str:
    """Why a plan lies outside the searched space, or an empty text where it lies inside."""
    copies = range(document.copies)
    stages = range(len(document.stages))
    for copy in copies:
        end = 0
        for stage in stages:
            workers = document.of_copy(copy, stage)
            if workers != tuple(range(workers[0], workers[0] + len(workers))):
                return f"stage {stage + 1} is not on consecutive workers in increasing order"
            if workers[0] < end:
                return f"stage {stage + 1} is on workers before those of stage {stage}"
            end = workers[-1] + 1
    return _unlike_copies(document) if document.copies > 1 else ""


def _unlike_copies(document: PlanDocument) -> str:
    """Why the copies of a plan are not one and the same pipeline in alike components of a level, or an empty text."""
    network, copies = document.network, range(document.copies)
    whys = [_unlike_components(document, level, copies) for level in range(1, len(network.starts) - 1)]
    found = [why for why in whys if why]
    if not whys:
        return "the workers are in no components that could hold a copy of the pipeline each"
    return found[-1] if len(found) == len(whys) else ""


def _unlike_components(document: PlanDocument, level: int, copies: range) -> str:
    """Why a plan has no copies in the components of a level, or an empty text."""
    starts, first = document.network.starts[level], document.network.component(level, document.of_copy(0, 0)[0])
    if first + len(copies) >= len(starts):
        return f"there are no {len(copies)} components in a row, from that of copy 1 on, for the copies of the pipeline"
    if not all(document.cluster.alike(level, first, first + copy) for copy in copies):
        return f"the components of the {len(copies)} copies of the pipeline are not alike"
    for copy in copies:
        begin, end = starts[first + copy : first + copy + 2]
        for stage in range(len(document.stages)):
            places = [worker - starts[first] for worker in document.of_copy(0, stage)]
            if list(document.of_copy(copy, stage)) != [begin + place for place in places] or begin + places[-1] >= end:
                return f"copy {copy + 1} of the pipeline is not in the places of copy 1 within its own component"
    return ""
