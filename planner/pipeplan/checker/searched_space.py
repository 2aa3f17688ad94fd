"""Whether a plan lies in the searched space, of which alone a certificate speaks.

docs/cost-model.md, "The space of plans", defines it: the stages of a pipeline follow the order of the worker numbers,
each on consecutive workers, and copies of a pipeline lie in the same places of all components of one level.
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
    """Why the copies of a plan are not one and the same pipeline in all components of a level, or an empty text."""
    starts = next((level for level in document.network.starts if len(level) - 1 == document.copies), None)
    if starts is None:
        return f"no level of the cluster has {document.copies} components, one for each copy of the pipeline"
    for copy in range(document.copies):
        for stage in range(len(document.stages)):
            places = [worker - starts[copy] for worker in document.of_copy(copy, stage)]
            first = [worker - starts[0] for worker in document.of_copy(0, stage)]
            if places != first or max(places) >= starts[copy + 1] - starts[copy]:
                return f"copy {copy + 1} of the pipeline is not in the places of copy 1 within its own component"
    return ""
