"""Memory over time of one worker a stage, the fullest, from the simulation."""

from __future__ import annotations

from collections.abc import Mapping

from pipeplan.report.document import Memory, columns
from pipeplan.report.replayed import Simulated
from pipeplan.report.source import Source

MOST_STAGES = 100
MOST_POINTS = 8_000
"""Of all stages together."""


def memory(source: Source, simulated: Simulated, end_s: float, measured: Mapping[int, int]) -> list[Memory]:
    """One worker a stage until `end_s`; where there are very many stages, of those evenly apart.

    `measured` has the peaks of a run, by stage.
    """
    stages = source.scenario.stages
    count = min(len(stages), MOST_STAGES)
    chosen = sorted({round(at * (len(stages) - 1) / max(count - 1, 1)) for at in range(count)})
    fullest: dict[int, tuple[int, int]] = {}
    for (stage, replica), steps in simulated.memory.items():
        peak = max((size for _, size in steps), default=0)
        if stage not in fullest or peak > fullest[stage][0]:
            fullest[stage] = peak, replica
    found = []
    for stage in chosen:
        if stage not in fullest:
            continue
        peak, replica = fullest[stage]
        load, steps = stages[stage], simulated.memory[stage, replica]
        at_first = load.memory_bytes if source.plan.inference else load.fixed_bytes + load.parameter_bytes
        points = _thinned([(0.0, at_first), *(step for step in steps if step[0] <= end_s)], MOST_POINTS // len(chosen))
        found.append(
            Memory(
                stage=stage,
                worker=load.workers[replica],
                capacity_bytes=source.capacity_bytes(load.workers),
                planned_bytes=load.memory_bytes,
                peak_bytes=max(peak, at_first),
                predicted=columns(("t", "bytes"), points),
                measured_peak_bytes=measured.get(stage),
            )
        )
    return found


def _thinned(steps: list[tuple[float, int]], most: int) -> list[tuple[float, int]]:
    """The steps that change something; where they are too many, of every run of them the highest, in its place."""
    kept = [steps[0]]
    for time_s, size in steps[1:]:
        if time_s == kept[-1][0]:
            kept[-1] = time_s, size
        elif size != kept[-1][1]:
            kept.append((time_s, size))
    if len(kept) <= most:
        return kept
    run = -(-len(kept) // most)
    return [max(kept[at : at + run], key=lambda step: step[1]) for at in range(0, len(kept), run)]
