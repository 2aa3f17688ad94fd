"""Reads the cluster in a plan.json, which `Cluster.to_json` wrote."""

from __future__ import annotations

from msgspec import Struct

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cluster_data.executor_costs import NO_COSTS, ExecutorCosts
from pipeplan.util.files import Node
from pipeplan.util.typed import Amount, decode


class ClusterFields(Struct):
    """The fields of a cluster in plan.json."""

    name: str
    device: Device
    levels: tuple[Level, ...]
    servers: tuple[Server, ...] = ()
    server_price: Amount | None = None
    executor: ExecutorCosts = NO_COSTS
    digest: str = ""

    def to_cluster(self) -> Cluster:
        """The cluster that `Cluster.to_json` wrote. Raises an `InputError` where a figure is implausible."""
        return Cluster(self.name, self.device, self.levels, self.servers, self.server_price, self.executor)


def cluster_from_json(node: Node) -> Cluster:
    """The cluster that `Cluster.to_json` wrote. Raises an `InputError` that names the field that is wrong."""
    with node.locating_errors():
        return decode(node, ClusterFields).to_cluster()
