"""What the plan expects of the cables, to stand beside what they carried."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeplan import contention
from pipeplan.cluster_data import Cluster
from pipeplan.cluster_json import from_json
from pipeplan.emulate.outcome import LinkUse
from pipeplan.emulate.servers import Part
from pipeplan.files import Node
from pipeplan.links import Links
from pipeplan.plan import Plan

_WAYS = {"out": contention.OUT, "in": contention.IN}


def beside(uses: Sequence[LinkUse], servers: Part, root: Node) -> tuple[LinkUse, ...]:
    """The same cables, with what plan.json, `root`, expects of them."""
    plan, cluster = Plan.from_json(root["plan"]), from_json(root["cluster"])
    links, pace_s = Links.of(cluster), root["prediction"]["minibatch_s"].number()
    by_name = {part.name: part for part in servers.cables}
    found = []
    for use in uses:
        part = by_name[use.name]
        busy_s = _busy_s(plan, cluster, links, root, part)[_WAYS[use.direction]]
        found.append(replace(use, predicted_bytes=busy_s * use.rate, predicted_busy=busy_s / pace_s))
    return tuple(found)


def _busy_s(plan: Plan, cluster: Cluster, links: Links, root: Node, part: Part) -> tuple[float, float]:
    """Seconds a minibatch, out and in."""
    predictions = root["prediction"]["stages"].items()
    names = ("parameter_bytes", "send_bytes", "receive_gradient_bytes")
    parameters, forward, backward = (np.array([one[name].number() for one in predictions]) for name in names)
    messages, rings = contention.crossing(
        plan, cluster, part.level, (parameters, forward, backward), not plan.inference
    )
    send, reduce = links.card(part.level, cluster.starts(part.level)[part.component])
    busy = messages[:, part.component] / send + rings[:, part.component] / reduce
    return float(busy[contention.OUT]), float(busy[contention.IN])


def unshaped(cluster: Cluster, servers: Part) -> tuple[str, ...]:
    """The names of the levels whose links join several components and are no shaped cables."""
    shaped = {cable.level for cable in servers.cables}
    counts = {level: len(cluster.starts(level)) - 1 for level in range(len(cluster.levels) + 1)}
    return tuple(
        cluster.levels[level].name
        for level in range(len(cluster.levels))
        if counts[level] > counts[level + 1] and level not in shaped
    )
