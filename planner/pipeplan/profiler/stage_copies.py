"""The time of what every stage computes for itself, which a profile charges to the first layers that need it."""

from __future__ import annotations

from pipeplan.profiler.clock import Clock, median
from pipeplan.profiler.layer_inputs import state_tensors
from pipeplan.profiler.layer_run import LayerRun
from pipeplan.util.units import show_time
from pipeplan_launch.tracing.shared_copies import shared_copies
from pipeplan_launch.tracing.subgraph import cut_subgraph

MAX_SHARE = 0.01
"""Share of the forward pass above which a remark is made."""
PASSES = 5


def copies_seconds(run: LayerRun, clock: Clock) -> float:
    """Median time of computing everything that several layers read and each stage computes for itself; 0 if nothing."""
    copies = shared_copies(run.traced)
    if not copies.tensors:
        return 0.0
    made = [spec.name for spec in copies.tensors]
    segment = cut_subgraph(run.traced, [], [], made, device=run.device, copies=copies.node_of)
    state = state_tensors(run.traced, segment, run.device)
    data = [run.batch.inputs[index] for index in segment.inputs]

    def call() -> None:
        with run.precision():
            segment.run(*state, *data, run.minibatch)

    seconds = [clock.measure(call) for _ in range(1 + PASSES)]
    clock.settle()
    return median([time_s() for time_s in seconds[1:]])


def copies_remarks(copies_s: float, forward_s: float) -> list[str]:
    """At most one sentence, if stages take a noticeable time for what no layer of theirs is charged for."""
    if copies_s <= MAX_SHARE * forward_s:
        return []
    said = f"masks, positions and the like take {show_time(copies_s)}, {copies_s / forward_s:.1%} of the forward pass"
    return [f"{said}: the first layers that read them are charged, and each later stage that reads them takes as long"]
