"""What bounds the pace: every resource, and how long a minibatch keeps it."""

from __future__ import annotations

from pipeplan.explanation import time_breakdown
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.report.document import Bound
from pipeplan.report.source import Source

DRAINING = "filling and draining the pipeline"
"""What a batch may be bound by: two of its parts together, its first minibatch's passes and transfers."""
MOST = 40
"""Resources that are listed, the busiest first."""


def bounds(source: Source) -> list[Bound]:
    """The resources, busiest first; with a flush the parts of a batch, which add up to the pace."""
    bound = source.root["prediction"]["bound_by"].text()
    if source.known is not None:
        found = time_breakdown.resource_loads(source.plan, source.known.problem, source.known.score)
    else:
        stated = [load for load in _stated(source, bound) if load.seconds > 0]
        found = sorted(stated, key=lambda load: (-load.seconds, load.name != bound))
    whole = source.pace_s or 1.0
    return [Bound(load.name, load.seconds, load.seconds / whole, _is(load.name, bound)) for load in found]


def _is(name: str, bound: str) -> bool:
    """Whether a resource is the one that plan.json names, or the part of a batch."""
    if bound == DRAINING:
        return name.endswith(": filling and draining") or name == "its transfers"
    return name == bound or (name.startswith(f"{bound}, minibatches ") or name == f"{bound} that is waited for")


def _stated(source: Source, bound: str) -> list[time_breakdown.ResourceLoad]:
    """What plan.json alone tells: passes, all-reduces and messages, each by itself, and what it names as `bound`."""
    batch = source.root["prediction"].get("batch")
    if batch is not None:
        minibatches = batch["minibatches"].integer(minimum=1) * source.plan.copies
        parts = {
            f"{batch['bound'].text()}, minibatches 2 to {batch['minibatches'].integer()}": "steady_s",
            "the first minibatch's passes: filling and draining": "work_s",
            "its transfers": "transfers_s",
            "gradient synchronisation that is waited for": "exposed_s",
            "synchronisation among the copies of the pipeline": "copies_s",
        }
        return [time_breakdown.ResourceLoad(name, batch[key].number() / minibatches) for name, key in parts.items()]
    found = []
    among = source.root["prediction"]["copies_synchronisation_s"].number()
    if source.plan.copies > 1:
        found.append(time_breakdown.ResourceLoad("synchronisation among the copies of the pipeline", among))
    for number, load in enumerate(source.scenario.stages, start=1):
        group = (source.plan.accumulate or 1) if source.plan.schedule in ACCUMULATING else load.replicas
        work = (load.forward_s + load.backward_s) / load.replicas
        found.append(time_breakdown.ResourceLoad(f"compute of stage {number}", work))
        found.append(time_breakdown.ResourceLoad(f"gradient synchronisation of stage {number}", load.sync_s / group))
        if number <= len(source.scenario.hops):
            hops = source.scenario.hops[number - 1]
            busy = max(max(hop.transmit_s, hop.back_s) / hop.links for hop in hops) / len(hops)
            found.append(time_breakdown.ResourceLoad(f"traffic from stage {number} to stage {number + 1}", busy))
    if all(load.name != bound for load in found):
        # A wait, a card or a depth: of these plan.json has the name of the one that binds, which takes the pace.
        found.append(time_breakdown.ResourceLoad(bound, source.pace_s))
    return found
