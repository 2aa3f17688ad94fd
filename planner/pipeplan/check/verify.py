"""Runs all checks of a plan in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.check import model as models
from pipeplan.check.certificate import check_certificate
from pipeplan.check.document import Document
from pipeplan.check.figures import figures
from pipeplan.check.stated import check_memory, check_pace, check_stages
from pipeplan.check.structure import check_options, check_structure
from pipeplan.errors import InputError
from pipeplan.files import Node
from pipeplan.profile_data import Profile


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    what: str
    """The property that was checked."""
    holds: bool | None
    """Whether it holds; None where it could not be checked."""
    text: str
    """A summary, or the reason why the property does not hold or was not checked."""

    @property
    def line(self) -> str:
        """The result as a line of text, such as `memory: ok, …`."""
        verdict = {True: "ok", False: "wrong", None: "not checked"}[self.holds]
        return f"{self.what}: {verdict}, {self.text}"


def verify(root: Node, profile: Profile) -> list[Finding]:
    """Check a plan.json against the profile that it was made from.

    Stops after the structure where that is wrong, because the other checks would be meaningless. Raises an `InputError`
    where plan.json is malformed or was made from another profile.
    """
    document = Document.of(root)
    if profile.digest() != document.digest:
        raise InputError("the profile is not the one that the plan was made from: their digests differ")
    every = document.accumulate or 1 if document.accumulates else 1
    model = models.build(profile, document.asked, inference=document.inference, update_every=every)
    results = [_try("structure", lambda: check_structure(document, model))]
    if results[0].holds is False:
        return results
    results.append(_try("constraints", lambda: check_options(document, model)))
    costs = figures(document, model)
    results.append(_try("pace", lambda: check_pace(document, model, costs)))
    results.append(_try("stages", lambda: check_stages(document, model, costs)))
    results.append(_try("memory", lambda: check_memory(document, costs)))
    results.append(_try("optimality", lambda: check_certificate(document, model), _reason(document)))
    return results


def _try(what: str, check: Callable[[], str | None], unchecked: str = "") -> Finding:
    """The result of a check that returns its summary, or None where it could not check, or raises an `InputError`."""
    try:
        text = check()
    except InputError as error:
        return Finding(what, False, str(error))
    return Finding(what, None, unchecked) if text is None else Finding(what, True, text)


def _reason(document: Document) -> str:
    """The reason why a plan has no certificate."""
    note = document.root.get("certificate_note")
    return note.text() if note else "plan.json has no certificate"
