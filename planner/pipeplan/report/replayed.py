"""The simulation behind a report: as `pipeplan simulate` has it, or a shorter one where that would take long."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from pipeplan.simulation import report
from pipeplan.simulation.engine import Replayed, replay
from pipeplan.simulation.memory import Steps, memory_over_time
from pipeplan.simulation.scenario import Scenario

MOST_PASSES = 40_000
"""Forward and backward passes that are simulated with shared cards: a few seconds."""
MOST_ALONE = 120_000
"""Without them."""


@dataclass(frozen=True)
class Simulated:
    """A replay and what it shows."""

    scenario: Scenario
    replayed: Replayed
    minibatches: int
    measured: report.Report
    remark: str
    """What was left out of it, in words; empty where it is what `pipeplan simulate` shows."""

    @cached_property
    def memory(self) -> Steps:
        """Bytes of every worker over time."""
        return memory_over_time(self.scenario, self.replayed, self.minibatches)


def simulate(scenario: Scenario) -> Simulated:
    """Replay a plan: enough for a steady state, or as much as fits into a few seconds."""
    wanted, remark = report.enough_minibatches(scenario), ""
    passes = (2 if scenario.schedule.trains else 1) * len(scenario.stages)
    count = wanted
    if wanted * passes > MOST_PASSES:
        scenario = replace(scenario, cards=None)
        count = min(wanted, max(MOST_ALONE // passes, 1))
        remark = "It is simulated with every link alone, as if network cards were not shared"
        remark += "." if count == wanted else f", and for {count} minibatches only."
    replayed = replay(scenario, count)
    return Simulated(scenario, replayed, count, report.measure(scenario, replayed, count), remark)
