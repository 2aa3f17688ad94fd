"""The predicted traffic of the emulated cables, and all-reduces on them: cables are shaped to the rate of messages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.cluster_json import cluster_from_json
from pipeplan.cluster_data.links import Links
from pipeplan.cost import contention
from pipeplan.cost.ddp_overlap import BUCKET_BYTES
from pipeplan.plan.plan import Plan
from pipeplan.problem.plan_file import step_time_s
from pipeplan.replay.emulated_network import NetworkPart
from pipeplan.replay.outcome import LinkUse
from pipeplan.replay.scaling import Scaling
from pipeplan.simulation.scenario import predicted_stages
from pipeplan.util.files import Node

_WAYS = {"out": contention.OUTGOING, "in": contention.INCOMING}
STEP_S = 0.002
"""Least seconds of a ring, of the emulation. Shorter rings are bound by the cost of messages and not by links."""
LEAST_BUCKET_BYTES = 2**16


def with_predictions(uses: Sequence[LinkUse], servers: NetworkPart, root: Node) -> tuple[LinkUse, ...]:
    """The traffic of cables together with its prediction by plan.json, `root`."""
    plan, cluster = Plan.from_json(root["plan"]), cluster_from_json(root["cluster"])
    links, pace_s = Links.of(cluster), step_time_s(root)
    by_name = {part.name: part for part in servers.cables}
    predicted = []
    for use in uses:
        part = by_name[use.name]
        busy_s = _busy_s(plan, cluster, links, root, part)[_WAYS[use.direction]]
        predicted.append(replace(use, predicted_bytes=busy_s * use.rate, predicted_busy=busy_s / pace_s))
    return tuple(predicted)


def _busy_s(plan: Plan, cluster: Cluster, links: Links, root: Node, part: NetworkPart) -> tuple[float, float]:
    """Predicted busy seconds per minibatch, out and in."""
    predictions = predicted_stages(root)
    names = ("parameter_bytes", "send_bytes", "receive_gradient_bytes")
    parameters, forward, backward = (np.array([float(getattr(stage, name)) for stage in predictions]) for name in names)
    messages, rings = contention.bytes_across_cards(
        plan, cluster, part.level, (parameters, forward, backward), not plan.inference
    )
    send, reduce = links.card(part.level, cluster.starts(part.level)[part.component])
    busy = messages[:, part.component] / send + rings[:, part.component] / reduce
    return float(busy[contention.OUTGOING]), float(busy[contention.INCOMING])


def unshaped_levels(cluster: Cluster, servers: NetworkPart) -> tuple[str, ...]:
    """Names of the levels that join several components by links without shaping."""
    shaped = {cable.level for cable in servers.cables}
    counts = {level: len(cluster.starts(level)) - 1 for level in range(len(cluster.levels) + 1)}
    return tuple(
        cluster.levels[level].name
        for level in range(len(cluster.levels))
        if counts[level] > counts[level + 1] and level not in shaped
    )


@dataclass(frozen=True)
class Rings:
    """The all-reduces of each stage's replicas."""

    plan: Plan
    cluster: Cluster
    servers: NetworkPart

    @cached_property
    def _links(self) -> Links:
        return Links.of(self.cluster)

    def _shaped(self, index: int) -> bool:
        """Whether a ring passes a shaped link."""
        workers, cluster = self.plan.stages[index].workers, self.cluster
        inside = cluster.server_of(min(workers)) == cluster.server_of(max(workers))
        return len(workers) > 1 and bool(self.servers.cables) and (self.servers.shapes_inside or not inside)

    def inflation(self, index: int) -> float:
        """Factor on the bytes of a stage's all-reduce that makes up for the other rate of messages."""
        if not self._shaped(index):
            return 1.0
        workers = self.plan.stages[index].workers
        return self._links.sendrecv_among(workers)[0] / self._links.allreduce_among(workers)[0]

    def bucket_bytes(self, index: int, scaling: Scaling) -> int:
        """Size of a bucket of a stage's gradients: the executor's, unless its ring would be too short."""
        workers = self.plan.stages[index].workers
        least = float(LEAST_BUCKET_BYTES)
        rate = self._links.sendrecv_among(workers)[0]
        if self._shaped(index) and math.isfinite(rate):
            least = max(least, len(workers) * scaling.rate(rate) * STEP_S)
        return round(max(least, BUCKET_BYTES * self.inflation(index) / scaling.bytes_by))
