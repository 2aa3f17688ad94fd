"""Checks the pace that plan.json states for its plan: by the formulas, or simulated where that differs from them.

The rule is checked, and not the simulation itself, which `pipeplan simulate` runs.
"""

from __future__ import annotations

from collections.abc import Callable

from pipeplan.checker.document import FLUSHING, PlanDocument
from pipeplan.util.files import Node
from pipeplan.util.units import show_time

CONFIRMED = 0.01
"""Relative. A simulation that differs from the formulas by less confirms them."""


def stated_pace_s(formulas_s: float, simulated_s: float | None, document: PlanDocument) -> float:
    """The pace to state for a plan with these paces by the formulas and the simulation, in seconds per minibatch.

    One pipeline without a flush is not stated faster than by the formulas.
    """
    if simulated_s is None:
        return formulas_s
    if document.copies == 1 and document.schedule not in FLUSHING:
        simulated_s = max(simulated_s, formulas_s)
    return simulated_s if abs(simulated_s / formulas_s - 1.0) > CONFIRMED else formulas_s


def check_stated_pace(document: PlanDocument, same: Callable[[Node, float], None]) -> str | None:
    """Check the stated pace, and return it in words; None where plan.json states none.

    Raises an `InputError` that names the first field that is wrong.
    """
    stated = document.root.get("stated")
    if stated is None:
        return None
    simulation = document.root["simulation"]
    paces = [found.number() for key in ("minibatch_s", "shallower_s") if (found := simulation.get(key)) is not None]
    if paces:
        same(simulation["ratio"], simulation["minibatch_s"].number() / document.pace_s)
    pace_s = stated_pace_s(document.pace_s, max(paces, default=None), document)
    same(stated["minibatch_s"], pace_s)
    same(stated["minibatches_per_s"], 1.0 / pace_s)
    simulated = pace_s != document.pace_s
    if stated["simulated"].boolean() is not simulated:
        stated["simulated"].fail(f"stated {stated['simulated'].value!r}, found {simulated!r}")
    words = f"{show_time(pace_s)} for each minibatch"
    return f"{words}, simulated; `pipeplan simulate` does it again" if simulated else f"{words}, as by the formulas"
