"""The executor's own work at a stage, and its memory: an independent implementation of docs/cost-model.md."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeplan.checker.document import DOUBLE_BUFFERED, FLUSHING, PlanDocument
from pipeplan.checker.model import Floats, Totals
from pipeplan.cluster_data.cluster import Cluster, Device


def executor_work_s(document: PlanDocument, neighbours: Any, crossing: Any, followed: Any) -> Any:
    """The executor's work at stages for one minibatch, on a device of speed 1, in seconds.

    `neighbours` is the number of stages before and behind, `crossing` the bytes over the boundaries to them in both
    directions, `followed` the bytes of the stage's parameters, or 0 where it is the last one.
    """
    costs, passes = document.cluster.executor, 1 if document.inference else 2
    often = 0.0 if document.inference or document.schedule in FLUSHING else 1.0
    if document.schedule == DOUBLE_BUFFERED:
        often /= document.accumulate or 1
    updates = 0.0 if document.inference else 1 / ((document.accumulate or 1) if document.accumulates else 1)
    time = passes * costs.pass_s + updates * costs.step_s + neighbours * (passes * costs.message_s)
    time = time + np.where(np.asarray(neighbours) == 2, 0.0, costs.read_s + costs.sample_s)
    copy_byte_s = costs.version_byte_s + (costs.correction_byte_s if document.options.correction == "ef" else 0.0)
    return time + crossing * costs.message_byte_s + followed * (often * copy_byte_s)


def worker_bytes(cluster: Cluster, stage_bytes: float) -> float:
    """Memory of a worker, in bytes: the stage's, the allocator's share of it, and the worker's own."""
    costs = cluster.executor
    return stage_bytes + stage_bytes * costs.allocator_share + costs.worker_bytes


def usable_of(device: Device) -> float:
    """Bytes of a device that a worker may take: all but the reserve, in whole bytes."""
    return math.ceil(device.memory_bytes - device.memory_reserve * device.memory_bytes)


def room_of(cluster: Cluster, device: Device) -> float:
    """The most bytes of a stage for which `worker_bytes` fits on this device."""
    costs = cluster.executor
    return (usable_of(device) - costs.worker_bytes) / (costs.allocator_share + 1)


def executor_work_between(document: PlanDocument, totals: Totals, cut: int, before: NDArray[np.intp]) -> Floats:
    """The executor's work at the stages from each of the cuts `before` to one cut, as `executor_work_s`."""
    both, last = totals.sent + totals.returned, cut + 1 == len(totals.cuts)
    weights = np.zeros(len(before)) if last else totals.parameters[cut] - totals.parameters[before]
    return np.asarray(
        executor_work_s(document, (before > 0).astype(int) + (not last), both[before] + both[cut], weights), dtype=float
    )
