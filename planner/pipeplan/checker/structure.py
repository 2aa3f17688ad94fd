"""Checks that the stages form a valid plan of the model on the cluster, within the user's options.

The module also decides whether the plan lies in the searched space. A certificate covers only this space
(docs/cost-model.md, "The space of plans").
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

from pipeplan.checker.document import FLUSH, WHOLE, PlanDocument
from pipeplan.checker.model import CheckedModel
from pipeplan.checker.virtual_stages import check_devices, check_held
from pipeplan.errors import InputError


def check_structure(document: PlanDocument, model: CheckedModel) -> str:
    """Check the partition of layers, their order and the workers, and return a summary.

    Raises an `InputError` that names the first violation.
    """
    if not document.stages:
        raise InputError("the plan has no stages")
    _partition(document, model)
    _order(document, model)
    _workers(document)
    if document.virtual:
        check_devices(document)
        check_held(document)
    _shares(document)
    layers, workers = len(model.names), sum(map(len, document.positions))
    return f"{_counted(len(document.stages), 'stage')} of {_counted(layers, 'layer')} on {_counted(workers, 'worker')}"


def check_options(document: PlanDocument, model: CheckedModel) -> str:
    """Check the constraints that the user asked for, and return a summary.

    Raises an `InputError` that names the first violation.
    """
    options, stages = document.options, len(document.stages)
    replicas = max(len(stage.workers) // document.copies for stage in document.stages)
    for what, asked, found in (
        ("stages", options.stages, stages),
        ("stages of each worker", options.virtual_stages, stages // len(document.devices)),
    ):
        if asked not in (None, found):
            raise InputError(f"{asked} {what} were asked for, the plan has {found}")
    for what, most, found in (
        ("stages", options.max_stages, stages),
        ("replicas of a stage", options.max_replicas, replicas),
        ("workers", options.max_workers, sum(map(len, document.positions))),
        ("copies of the pipeline", None if options.allow_copies else 1, document.copies),
    ):
        if most is not None and found > most:
            raise InputError(f"at most {most} {what} were asked for, the plan has {found}")
    if options.grid and (why := _no_grid(document)):
        raise InputError(f"a uniform grid was asked for, but {why}")
    stage_of = {name: number for number, stage in enumerate(document.stages, start=1) for name in stage.layers}
    for name, number in options.pins:
        if stage_of[name] != number:
            raise InputError(
                f"layer {name!r} was asked for in stage {number}, the plan has it in stage {stage_of[name]}"
            )
    if any(stage.recompute for stage in document.stages) and not (options.recompute and model.training):
        raise InputError("a stage of the plan computes its forward pass again, which was not allowed")
    return "the plan satisfies its options"


def _no_grid(document: PlanDocument) -> str:
    """The reason why a plan is not a uniform grid; empty for a uniform grid.

    A grid has no copies, the same number of workers for every stage, and stages on consecutive workers from worker 0
    on. It uses whole servers unless it fits in one.
    """
    replicas, count = len(document.stages[0].workers), len(document.stages)
    ends = list(accumulate(document.cluster.server_sizes))
    if document.copies > 1:
        return f"the plan has {document.copies} copies of a pipeline"
    if [worker for stage in document.stages for worker in stage.workers] != list(range(replicas * count)):
        return f"its stages are not on the workers 0 to {replicas * count - 1}, one after the other"
    if any(len(stage.workers) != replicas for stage in document.stages):
        return f"not every stage is on {_counted(replicas, 'worker')}"
    if document.accumulates and document.minibatches % replicas:
        return f"{document.minibatches} minibatches are not the same number for each of {replicas} replicas"
    if replicas * count > ends[0] and replicas * count not in ends:
        return f"{replicas * count} workers are no whole number of servers"
    return ""


def _partition(document: PlanDocument, model: CheckedModel) -> None:
    counts = Counter(name for stage in document.stages for name in stage.layers)
    for name, times in counts.items():
        if times > 1:
            raise InputError(f"layer {name!r} is in the plan {times} times")
    for name in sorted(counts.keys() ^ set(model.names)):
        where = "plan but not the profile" if name in counts else "profile but not the plan"
        raise InputError(f"layer {name!r} is in the {where}")
    for number, stage in enumerate(document.stages, start=1):
        if not stage.layers:
            raise InputError(f"stage {number} has no layers")


def _order(document: PlanDocument, model: CheckedModel) -> None:
    """Raise an `InputError` unless every stage ends at a cut. The inputs of a layer must be in the same or an earlier
    stage, and layers that must share a stage must be in the same stage.
    """
    cut = 0
    for number, stage in enumerate(document.stages, start=1):
        cut |= model.set_of(stage.layers)
        for block, needs in zip(model.blocks, model.needs, strict=True):
            if cut & block and block & ~cut:
                raise InputError(
                    f"the end of stage {number} separates {_two(model, block, cut)}, which must be together"
                )
            if cut & block and needs & ~cut:
                reader = model.names[_lowest(block)]
                source = model.names[_lowest(needs & ~cut)]
                raise InputError(f"stage {number} holds layer {reader!r}, but {source!r}, which it needs, comes later")


def _workers(document: PlanDocument) -> None:
    workers = Counter(worker for device in document.positions for worker in device)
    for worker, times in workers.items():
        if times > 1:
            raise InputError(f"worker {worker} is in the plan {times} times")
    total = document.cluster.workers
    if max(workers, default=0) >= total:
        raise InputError(f"the plan uses worker {max(workers)}, the cluster has workers 0 to {total - 1}")
    for number, stage in enumerate(document.stages, start=1):
        if not stage.workers or len(stage.workers) % document.copies:
            raise InputError(
                f"stage {number} is on {_counted(len(stage.workers), 'worker')}: each of {document.copies} copies of "
                "the pipeline needs as many"
            )


def _shares(document: PlanDocument) -> None:
    """Raise an `InputError` if unequal shares are used outside of plain data parallelism, or do not add up to an
    update.
    """
    options, shared = document.options, [stage for stage in document.stages if stage.shares]
    plain = len(document.stages) == 1 and document.schedule == FLUSH and options.sharding == WHOLE
    if bool(shared) != options.unequal_shares or (shared and not plain):
        raise InputError("unequal shares of a batch and the option for them do not go together")
    for stage in shared:
        if len(stage.shares) != len(stage.workers) or sum(stage.shares) != document.minibatches:
            raise InputError(
                f"{_counted(len(stage.workers), 'worker')} cannot share {document.minibatches} minibatches as "
                f"{', '.join(map(str, stage.shares))}"
            )


def _two(model: CheckedModel, block: int, cut: int) -> str:
    return f"{model.names[_lowest(block & cut)]!r} and {model.names[_lowest(block & ~cut)]!r}"


def _lowest(layers: int) -> int:
    return (layers & -layers).bit_length() - 1


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + "s" * (count != 1)


def outside_space(document: PlanDocument) -> str:
    """The reason why a plan lies outside the searched space; empty if the plan lies inside."""
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
    """The reason why the copies of a plan are not one pipeline in equal components of a level; empty if they are."""
    network, copies = document.network, range(document.copies)
    whys = [_unlike_components(document, level, copies) for level in range(1, len(network.starts) - 1)]
    found = [why for why in whys if why]
    if not whys:
        return "the workers are in no components that could hold a copy of the pipeline each"
    return found[-1] if len(found) == len(whys) else ""


def _unlike_components(document: PlanDocument, level: int, copies: range) -> str:
    """The reason why a plan has no copies in the components of a level; empty if the plan has such copies."""
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
