"""Checks the step time that plan.json states: simulated, and at least that of the formulas.

The rule is checked, and not the simulation itself, which `pipeplan simulate` runs.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeplan.checker.document import PlanDocument
from pipeplan.util.files import Node
from pipeplan.util.units import show_time


def check_step_time(document: PlanDocument, same: Callable[[Node, float], None]) -> str:
    """Check the stated step time, and return it in words. Raises an `InputError` that names the first wrong field."""
    stated, simulation = document.root["stated"], document.root["simulation"]
    simulated = simulation.get("minibatch_s")
    step_s = document.pace_s
    if simulated is not None:
        same(simulation["ratio"], simulated.number() / document.pace_s)
        step_s = max(step_s, simulated.number())
    same(stated["minibatch_s"], step_s)
    same(stated["minibatches_per_s"], 1.0 / step_s)
    if stated["simulated"].boolean() is not (simulated is not None):
        stated["simulated"].fail(f"stated {stated['simulated'].value!r}, found {simulated is not None!r}")
    words = f"{show_time(step_s)} for each minibatch"
    return f"{words}, simulated; `pipeplan simulate` does it again" if simulated else f"{words}, by the formulas"
