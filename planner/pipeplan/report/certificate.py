"""The verdict and the certificate of a plan in words: what is proven, by whom, and what that does not cover."""

from __future__ import annotations

from typing import Any

from pipeplan.planning.verdict import TOLERANCE
from pipeplan.report import text_alternative
from pipeplan.report.source import Source
from pipeplan.util.text import one_line


def certificate(source: Source) -> dict[str, Any]:
    """`proven`, `gap` and the sentences."""
    root = source.root
    gap, bound = root.get("gap"), root.get("bound_s")
    left = gap.number() if gap else None
    proven = root["verdict"]["proven"].boolean() and (left or 0.0) <= TOLERANCE
    sentences = [f"{_capital(one_line(root['verdict']['text'].text()))}."]
    if bound is not None:
        sentences.append(_bound(source, bound.number(), left))
    sentences.append(_covers(source))
    sentences.append(_document(source))
    return {"proven": proven, "gap": left, "bound_s": bound.number() if bound else None, "sentences": sentences}


def in_short(found: dict[str, Any]) -> str:
    """One sentence of it."""
    if found["proven"]:
        return "It is proven to be the fastest plan in the space that was searched, for these predicted times."
    if found["gap"] is not None and found["gap"] > TOLERANCE:
        return f"It is not proven to be the fastest: at most {found['gap']:.2%} could be gained."
    return "It is the fastest plan by one solver, which no second one confirmed."


def _bound(source: Source, bound_s: float, gap: float | None) -> str:
    least = f"No plan in the space that was searched is faster than {text_alternative.time(bound_s)} a minibatch"
    if gap is not None and gap <= TOLERANCE:
        return f"{least}, which is this plan's pace."
    pace = text_alternative.time(source.pace_s)
    return f"{least}; this plan takes {pace}, so that at most {gap or 0:.2%} could be gained."


def _covers(source: Source) -> str:
    return (
        "This is proven of the predicted times: of the profile's figures, the cluster's rates and the cost model, not "
        "of what a run will measure."
    )


def _document(source: Source) -> str:
    note = source.root.get("certificate_note")
    if source.root.get("certificate") is not None:
        return "plan.json holds a certificate, which `pipeplan check` verifies without the solvers."
    return one_line(
        f"plan.json holds no certificate: {note.text()}." if note and note.text() else "plan.json holds no certificate."
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
