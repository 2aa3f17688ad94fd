"""The emulated cluster of a replay: its cables, scale and all-reduces, and the plan folder whose stages sleep.

The cluster is a tree of switches, in which every component's card is a cable with the rate of its messages. Bytes and
rates are divided by `bytes_by`, so that a machine with two cores can carry the traffic of all cables together. Times
are multiplied by `time_by`, and rates are divided by it again, so that the executor's own time per minibatch is
negligible. All ratios of times are then as on the hardware.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.cluster_data.links import Links
from pipeplan.cost.ddp_overlap import BUCKET_BYTES
from pipeplan.plan import schedules
from pipeplan.plan.plan import Plan
from pipeplan.problem.plan_file import PlanFile
from pipeplan.profile_data.profile import Profile
from pipeplan.simulation.scenario import PredictedStage, Scenario, StageLoad
from pipeplan.util.files import Node, read_document, write_text
from pipeplan_launch.files import with_checksum

MOST_TRAFFIC = 1e8
"""Most bytes/s of all workers together: on two cores 16 workers reach 1.3 Gbit/s without computing."""
LEAST_BYTES_BY = 20.0
LEAST_TIME_BY = 3.0
OWN_S = 0.005
"""The executor's own time of a worker per minibatch, with its waits for a core: 4 to 6 ms where 16 workers share two
slow cores."""
OWN_SHARE = 0.02
"""Most share of it in the time of a worker that never waits."""
WAITING_SHARE = 0.25
"""Most share of it in the time for which a worker waits. Waits are uneven: a worker that is late after a short one
holds up the others, though it waits long in the mean."""
CPU_S = 0.006
"""Processor time of the executor per minibatch and stage, which the step time must exceed for all stages together."""


@dataclass(frozen=True)
class Scaling:
    """The factors of an emulation."""

    bytes_by: float
    time_by: float

    def size(self, size: float) -> int:
        """Emulated bytes of a message or of parameters."""
        return round(size / self.bytes_by)

    def rate(self, rate: float) -> float:
        """Emulated bytes/s of a link."""
        return rate / self.bytes_by / self.time_by


def scaling_for(scenario: Scenario, inflations: Sequence[float]) -> Scaling:
    """The factors for a plan. `inflations` are the stages' factors on the bytes of all-reduces (`Rings.inflation`)."""
    step_time = scenario.predicted_s
    own = max(OWN_S / _spare_s(stage, step_time) for stage in scenario.stages)
    if scenario.drains and scenario.accumulate:
        own = OWN_S * _passed_one_by_one(scenario) / (OWN_SHARE * scenario.accumulate * step_time)
    time_by = max(LEAST_TIME_BY, own, CPU_S * len(scenario.stages) / step_time)
    return Scaling(max(LEAST_BYTES_BY, _traffic(scenario, inflations) / time_by / MOST_TRAFFIC), time_by)


def _spare_s(stage: StageLoad, step_time_s: float) -> float:
    """The part of a worker's time per minibatch that the executor may take: some of its waits, and a little more."""
    whole = stage.replicas * step_time_s
    return WAITING_SHARE * max(0.0, whole - stage.busy_s) + OWN_SHARE * whole


def _passed_one_by_one(scenario: Scenario) -> int:
    """Minibatches of stages whose passes follow each other in a batch that drains, so that no waiting makes up for the
    executor's own time: those of a worker, and one through the stages of all other workers."""
    assert scenario.accumulate is not None
    stages = len(scenario.stages)
    most = 0
    for load in scenario.stages:
        own = sum(other.workers == load.workers for other in scenario.stages)
        most = max(most, -(-scenario.accumulate // load.replicas) * own + stages - own)
    return most


def _traffic(scenario: Scenario, inflations: Sequence[float]) -> float:
    """Bytes/s of all workers together, on the hardware."""
    per_minibatch = 0.0
    for stage, inflation, hops in zip(scenario.stages, inflations, (*scenario.hops, ()), strict=True):
        rings = 2 * (stage.replicas - 1) * stage.parameter_bytes * inflation
        per_minibatch += rings / (scenario.accumulate or stage.replicas)
        per_minibatch += sum((hop.transmit_s + hop.back_s) * hop.bandwidth for hop in hops) / max(1, len(hops))
    return per_minibatch / scenario.predicted_s


@dataclass(frozen=True)
class NetworkPart:
    """A component of the cluster, joined to others by a cable."""

    name: str
    rate: float
    """Bytes/s of its cable in each direction; infinite where it is not shaped."""
    workers: tuple[int, ...] = ()
    """Workers behind the cable without cables of their own."""
    below: tuple[NetworkPart, ...] = field(default_factory=tuple)
    level: int = 0
    """Level of the component, 0 for a worker."""
    component: int = 0
    """Number of the component at its level."""

    @property
    def cables(self) -> list[NetworkPart]:
        """This part and all parts below it that have a shaped cable."""
        own = [self] if math.isfinite(self.rate) else []
        return own + [cable for part in self.below for cable in part.cables]

    @property
    def shapes_inside(self) -> bool:
        """Whether links inside servers are cables too."""
        return self.leaves[0].level == 0

    @property
    def leaves(self) -> list[NetworkPart]:
        """The lowest parts, in the order of their workers."""
        return [leaf for part in self.below for leaf in part.leaves] if self.below else [self]


MOST_INSIDE = 2.0
"""Largest ratio of the rate inside a server to that of its card. One machine cannot carry bursts of faster links."""
HEADERS = 1.011
"""Bytes of a cable for each byte of messages: headers of frames of 9000 bytes, and acknowledgements of every second one
on the way back. The rates of a cluster are those of messages, without these."""


def parts_of(cluster: Cluster, workers: Collection[int] | None = None) -> NetworkPart:
    """The tree of the whole cluster, for a plan that runs on these workers, by default all.

    Links inside servers are cables too where the plan runs on a single server, or where they are not much faster than
    those between servers. Otherwise messages inside a server are as fast as this machine.
    """
    links = Links.of(cluster)
    own = links.card(cluster.server_level, 0)[0]
    inside = [links.card(0, first)[0] for first in cluster.starts(cluster.server_level)[:-1]]
    # The rate is infinite in a server with one worker, which has no links inside.
    slow = max((rate for rate in inside if math.isfinite(rate)), default=math.inf) <= MOST_INSIDE * own
    servers = {cluster.server_of(worker) for worker in (range(cluster.workers) if workers is None else workers)}
    lowest = 0 if len(servers) == 1 or slow else cluster.server_level
    return _part(cluster, links, len(cluster.levels), 0, lowest)


def _part(cluster: Cluster, links: Links, level: int, component: int, lowest: int) -> NetworkPart:
    starts = cluster.starts(level)
    workers = range(starts[component], starts[component + 1])
    rate = links.card(level, workers[0])[0]
    if level == lowest:
        name = f"worker {component}" if level == 0 else f"{cluster.levels[level - 1].name} {component}"
        return NetworkPart(name, rate, tuple(workers), (), level, component)
    inside = dict.fromkeys(cluster.component(level - 1, worker) for worker in workers)
    name = f"{cluster.levels[level - 1].name} {component}"
    below = tuple(_part(cluster, links, level - 1, component, lowest) for component in inside)
    return NetworkPart(name, rate, (), below, level, component)


def network_tree(part: NetworkPart, scaling: Scaling) -> dict[str, Any]:
    """The tree in the order for the emulation. Its root is always a switch."""
    tree = _node(part, scaling)
    return {"name": "", "below": [tree]} if part.workers else tree


def _node(part: NetworkPart, scaling: Scaling) -> dict[str, Any]:
    node: dict[str, Any] = {"name": part.name, "workers": len(part.workers)}
    if math.isfinite(part.rate):
        node["rate"] = f"{max(1, round(8 * HEADERS * scaling.rate(part.rate)))}bit"
    if part.below:
        node["below"] = [_node(child, scaling) for child in part.below]
    return node


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


LEAST_LAYER_S = 0.002
"""Least forward time of an emulated layer, in seconds of the emulation. Shorter neighbours are merged."""


def write_folder(
    source: Path, root: Node, profile: Profile | None, scaling: Scaling, rings: Rings, minibatches: int, folder: Path
) -> None:
    """Write the emulation of the plan folder at `source`, whose plan.json is `root`, for so many minibatches."""
    plan = rings.plan
    step_time_s = PlanFile.of(root).step_s
    sizes = cluster_from_json(root["cluster"]).server_sizes  # the emulated network has idle servers, too
    servers: dict[str, Any] = {"servers": len(sizes), "workers_per_server": max(sizes)}
    servers |= {"server_sizes": list(sizes)} if len(set(sizes)) > 1 else {}
    for index, prediction in enumerate(PlanFile.of(root).prediction.stages):
        document = read_document(source / "stages" / f"stage-{index}.json", "pipeplan-stage", 1).mapping()
        emulation = {
            "layers": _layers(plan, index, prediction, profile, scaling, rings.inflation(index)),
            "update_s": _update_s(plan, prediction) * scaling.time_by,
            "before": _crossing(prediction.receive_bytes, prediction.send_gradient_bytes, scaling) if index else None,
            "after": _crossing(prediction.send_bytes, prediction.receive_gradient_bytes, scaling)
            if index < len(plan.stages) - 1
            else None,
            "minibatches": minibatches,
            "bucket_bytes": rings.bucket_bytes(index, scaling),
        }
        changes = {
            "model": {"ref": "emulated", "graph_hash": "emulated", "granularity": "layer"},
            "minibatch": 1,
            "device": "cpu",
            "emulation": emulation,
            "links": None,
            **servers,
            "prediction": {"minibatch_s": step_time_s * scaling.time_by},
        }
        write_text(folder / "stages" / f"stage-{index}.json", with_checksum(document | changes, indent=1))


def _update_s(plan: Plan, prediction: PredictedStage) -> float:
    """Seconds of one step of the optimiser. The prediction has its share per minibatch of a replica."""
    return prediction.update_s / float(schedules.update_share(plan.accumulate)) if prediction.update_s else 0.0


def _layers(
    plan: Plan, index: int, prediction: PredictedStage, profile: Profile | None, scaling: Scaling, inflation: float
) -> list[dict[str, Any]]:
    """The stage's times and parameters as layers, in proportion to the layers of the profile."""
    stage = plan.stages[index]
    forward, backward = prediction.forward_s, prediction.backward_s
    if stage.recompute:  # the executor itself runs the second forward pass
        backward = max(0.0, backward - forward)
    size = 0.0 if plan.inference else prediction.parameter_bytes * inflation
    shares = _shares(stage.layers, profile)
    pieces = [
        {
            "forward_s": forward * one[0] * scaling.time_by,
            "backward_s": backward * one[1] * scaling.time_by,
            "parameter_bytes": scaling.size(size * one[2]),
            # Which layer makes how many of the gradients makes no difference, as one pass makes those of the stage.
            "weights_s": prediction.weights_s * one[1] * scaling.time_by,
        }
        for one in shares
    ]
    return _put_together(pieces)


def _shares(names: Sequence[str], profile: Profile | None) -> list[tuple[float, float, float]]:
    """Shares of the stage's forward time, backward time and parameters, by layer; one layer without a profile."""
    if profile is None:
        return [(1.0, 1.0, 1.0)]
    by_name = {layer.name: layer for layer in profile.layers}
    layers = [by_name[name] for name in names]
    columns = [
        _normal([layer.forward_s for layer in layers]),
        _normal([layer.backward_s for layer in layers]),
        _normal([float(layer.parameter_bytes) for layer in layers]),
    ]
    return list(zip(*columns, strict=True))


def _normal(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [value / total if total else 1 / len(values) for value in values]


def _put_together(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge neighbours that are too short for an exact sleep."""
    merged: list[dict[str, Any]] = []
    for piece in pieces:
        if merged and min(merged[-1]["forward_s"], piece["forward_s"]) < LEAST_LAYER_S:
            merged[-1] = {name: merged[-1][name] + value for name, value in piece.items()}
        else:
            merged.append(dict(piece))
    return merged


def _crossing(sent: int, returned: int, scaling: Scaling) -> dict[str, int]:
    return {"sent": scaling.size(sent), "returned": scaling.size(min(sent, returned))}
