"""All-reduces on emulated links, which are shaped to the rate of messages."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.links import Links
from pipeplan.cost.ddp_overlap import BUCKET_BYTES
from pipeplan.plan.plan import Plan
from pipeplan.replay.emulated_network import NetworkPart
from pipeplan.replay.scaling import Scaling

STEP_S = 0.002
"""Least seconds of a ring, of the emulation. Shorter rings are bound by the cost of messages and not by links."""
LEAST_BUCKET_BYTES = 2**16


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
