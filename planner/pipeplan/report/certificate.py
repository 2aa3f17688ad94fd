"""The verdict and the certificate of a plan in words: the proof, its author, and its limits."""

from __future__ import annotations

from typing import Any

from pipeplan.planning.verdict import TOLERANCE
from pipeplan.report import labels
from pipeplan.report.source import Source
from pipeplan.util.text import one_line


def certificate(source: Source) -> dict[str, Any]:
    """The section `certificate` of the report: `proven`, `gap`, `bound_s` and the sentences."""
    root = source.root
    gap_node, bound = root.get("gap"), root.get("bound_s")
    gap = gap_node.number() if gap_node else None
    proven = root["verdict"]["proven"].boolean() and (gap or 0.0) <= TOLERANCE
    sentences = [f"{labels.capitalised(one_line(root['verdict']['text'].text()))}."]
    if bound is not None:
        sentences.append(_bound_sentence(source, bound.number(), gap))
    sentences.append(_coverage_sentence())
    sentences.append(_document_sentence(source))
    return {"proven": proven, "gap": gap, "bound_s": bound.number() if bound else None, "sentences": sentences}


def in_short(section: dict[str, Any]) -> str:
    """The section in one sentence."""
    if section["proven"]:
        return "It is proven to be the fastest plan in the space that was searched, for these predicted times."
    if section["gap"] is not None and section["gap"] > TOLERANCE:
        return f"It is not proven to be the fastest: at most {section['gap']:.2%} could be gained."
    return "It is the fastest plan by one solver, and no second solver confirmed that."


def _bound_sentence(source: Source, bound_s: float, gap: float | None) -> str:
    least = f"No plan in the space that was searched is faster than {labels.time(bound_s)} a minibatch"
    if gap is not None and gap <= TOLERANCE:
        return f"{least}, which is this plan's pace."
    return f"{least}; this plan takes {labels.time(source.pace_s)}, so that at most {gap or 0:.2%} could be gained."


def _coverage_sentence() -> str:
    return (
        "The proof is about the predicted times: the profile's figures, the cluster's rates and the cost model. "
        "It says nothing about the times that a run will measure."
    )


def _document_sentence(source: Source) -> str:
    note = source.root.get("certificate_note")
    if source.root.get("certificate") is not None:
        return "plan.json holds a certificate, which `pipeplan check` verifies without the solvers."
    return one_line(
        f"plan.json holds no certificate: {note.text()}." if note and note.text() else "plan.json holds no certificate."
    )
