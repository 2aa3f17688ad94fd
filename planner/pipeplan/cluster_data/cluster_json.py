"""Reads the cluster in a plan.json, which `Cluster.to_json` wrote."""

from __future__ import annotations

from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cluster_data.executor_costs import executor_costs_from_json
from pipeplan.util.files import Node


def cluster_from_json(node: Node) -> Cluster:
    """The cluster that `Cluster.to_json` wrote. Raises an `InputError` that names the field that is wrong."""
    with node.locating_errors():
        price, servers = node.get("server_price"), node.get("servers")
        return Cluster(
            name=node["name"].text(),
            device=_device(node["device"]),
            levels=tuple(_level(level) for level in node["levels"].items()),
            machines=tuple(_server(server) for server in servers.items()) if servers else (),
            server_price=price.number() if price else None,
            executor=executor_costs_from_json(node.get("executor")),
        )


def _server(node: Node) -> Server:
    price, name = node.get("price_per_hour"), node.get("name")
    return Server(
        device=_device(node["device"]),
        inside=_level(node["inside"]),
        card=node["card"].number(),
        price_per_hour=price.number() if price else None,
        name=name.text() if name else "",
    )


def _device(node: Node) -> Device:
    cores = node.get("cores")
    return Device(
        name=node["name"].text(),
        kind=node["kind"].text(),
        memory_bytes=node["memory_bytes"].size(),
        speed=node["speed"].number(),
        cores=number_of_cores(cores),
    )


def number_of_cores(node: Node | None) -> int | float:
    """The cores that workers share: a whole number, or a measured one of at least 1; 0 without a node."""
    if node is None:
        return 0
    cores = node.number()
    if cores < 1:
        node.fail(f"expected at least 1, found {cores:g}")
    return int(cores) if cores.is_integer() else cores


def _level(node: Node) -> Level:
    source = node.get("source")
    return Level(
        name=node["name"].text(),
        count=node["count"].integer(),
        bandwidth=node["bandwidth"].number(),
        latency_s=node["latency_s"].number(),
        allreduce_efficiency=node["allreduce_efficiency"].number(),
        sendrecv_efficiency=node["sendrecv_efficiency"].number(),
        source=source.text() if source else "",
    )
