"""Checks what plan.json claims to be proven: status, bound, gap and verdict, with or without a certificate."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from pipeplan.checker import verdict_words
from pipeplan.checker.certificates.certificate import CertifiedBound
from pipeplan.checker.document import PlanDocument
from pipeplan.checker.model import CheckedModel
from pipeplan.checker.pace import ChargedPace
from pipeplan.checker.shared_cards import shared_cores_bound_s
from pipeplan.checker.verdict_words import TOLERANCE, ProofState, SolverAnswer, gap_of, percent
from pipeplan.checker.virtual_stages import check_bound
from pipeplan.errors import InputError
from pipeplan.util.files import Node
from pipeplan.util.units import show_time

SEARCH = "search"
"""The search for plans whose workers run several stages, which proves nothing but a bound."""
RELAXATION = "relaxation"
"""The bound of the choice that led to the plan, on simulated times."""
SOLVERS = ("DP", "ILP (HiGHS)", "ILP (CBC)", SEARCH, RELAXATION)
STATUSES = (verdict_words.OPTIMAL, verdict_words.FEASIBLE, verdict_words.INFEASIBLE, "time limit")
NOT_SHOWN = "stated, not shown"
CONFIGURATION = re.compile(r"([1-9][0-9]*×\()?[1-9][0-9]*(-[1-9][0-9]*)*(\)| × [1-9][0-9]* stages)?", re.ASCII)
"""Replica counts, such as `15-1`, `4×(1-1)` or `8-8 × 2 stages`."""


@dataclass(frozen=True)
class ShownBound:
    """The bound that a certificate shows for a plan whose cost was checked. Times are in seconds per minibatch."""

    step_s: float
    """The step time of the plan."""
    bound_s: float
    """No plan of the searched space takes less, with everything charged."""

    @property
    def gap(self) -> float:
        """How much faster, at most, another plan of the searched space is: step time over bound, minus 1."""
        return gap_of(self.step_s, self.bound_s)

    @property
    def optimal(self) -> bool:
        """Whether no plan of the searched space is faster, to `verdict_words.TOLERANCE`."""
        return self.gap <= TOLERANCE

    @property
    def text(self) -> str:
        """The bound that the certificate shows, as a clause."""
        if self.optimal:
            return "no plan of the searched space is faster"
        return (
            f"no plan of the searched space takes less than {show_time(self.bound_s)}, so none is more than "
            f"{percent(self.gap)} faster"
        )


def check_claims(
    document: PlanDocument, model: CheckedModel, pace: ChargedPace, certified: CertifiedBound | None
) -> str | None:
    """Check that status, gap and verdict follow from the figures and from the solvers' record.

    Returns a summary, or None where no certificate shows the bound. Raises an `InputError` that names the first field
    that claims something else.
    """
    root, step_s = document.root, document.step_s
    bound = root["bound_s"].number()
    if bound > step_s * (1 + TOLERANCE):
        root["bound_s"].fail(f"stated {bound!r}, but this plan takes {step_s!r}")
    found = gap_of(step_s, bound)
    _check_gap(root, found)
    if document.virtual:
        return _check_search(document, model, pace, found)
    verdict = root["verdict"]
    state = ProofState(
        step_s=step_s,
        bound_s=bound,
        answers=tuple(_answer(node, pace, step_s) for node in verdict["solvers"].items()),
        cores_s=shared_cores_bound_s(document, model),
    )
    _check_origin(root["bound_s"], state)
    if root["status"].text() != state.status:
        root["status"].fail(f"stated {root['status'].value!r}, found {state.status!r}")
    _check_verdict(verdict, state.proven, state.text)
    if certified is None or bound > certified.bound_s * (1 + TOLERANCE):
        return None
    return f"{state.status}, gap {found:.2%}; what each solver found is {NOT_SHOWN}"


def _check_gap(root: Node, found: float) -> None:
    """Raise an `InputError` unless plan.json states this gap; null stands for the infinite one of a bound of 0."""
    gap = root.get("gap")
    stated = math.inf if gap is None else gap.number()
    if stated != found and not abs(stated - found) <= 1e-9:
        raise InputError(f"{root.where}: gap: stated {root['gap'].value!r}, found {found!r}")


def _check_verdict(verdict: Node, proven: bool, text: str) -> None:
    """Raise an `InputError` where the verdict is not what the figures say."""
    for key, expected in (("agree", True), ("proven", proven)):
        if verdict[key].boolean() is not expected:
            verdict[key].fail(f"stated {verdict[key].value!r}, found {expected!r}")
    if verdict["text"].text() != text:
        verdict["text"].fail(f"found {text!r}")


def _check_search(document: PlanDocument, model: CheckedModel, pace: ChargedPace, gap: float) -> str:
    """`check_claims` for a plan whose workers run several stages: the bound follows from the work alone."""
    root = document.root
    verdict, bound_s = root["verdict"], root["bound_s"].number()
    if [_answer(node, pace, document.step_s).solver for node in verdict["solvers"].items()] != [SEARCH]:
        verdict["solvers"].fail(f"plans of {document.schedule} are found by a search")
    work = model.forward_s + model.backward_s + model.update_s
    fastest = max(device.speed for device in document.cluster.devices)
    blocks = model.members(list(model.blocks)).astype(float) @ work
    check_bound(document, len(model.blocks), float(work.sum()) / fastest, float(blocks.max()) / fastest, bound_s)
    status = verdict_words.OPTIMAL if gap <= TOLERANCE else verdict_words.FEASIBLE
    if root["status"].text() != status:
        root["status"].fail(f"stated {root['status'].value!r}, found {status!r}")
    _check_verdict(verdict, False, verdict_words.search_text(document.step_s, bound_s))
    return f"a search found the plan; no plan of {document.schedule} is more than {gap:.1%} faster, by the work alone"


def _answer(node: Node, pace: ChargedPace, step_s: float) -> SolverAnswer:
    """The record of one solver. Raises an `InputError` where it contradicts itself or this plan."""
    if node["solver"].text() not in SOLVERS:
        node["solver"].fail(f"there is no such solver: {node['solver'].value!r}")
    status = node["status"].text()
    if status not in STATUSES:
        node["status"].fail(f"there is no such status: {status!r}")
    charged, note = node["charged"].boolean(), node["note"].text()
    found, limit, gap = (node.get(key) for key in ("minibatch_s", "bound_s", "gap"))
    minibatch_s = found.number() if found else math.inf
    bound_s = limit.number() if limit else math.inf
    config = node.get("config")
    if (found is None) is not (config is None):
        node.fail("a configuration goes with a pace")
    if config is not None and not CONFIGURATION.fullmatch(config.text()):
        config.fail("it is no configuration")
    if (found is not None) is not (status in (verdict_words.OPTIMAL, verdict_words.FEASIBLE)):
        node.fail(f"the status {status!r} does not go with its pace")
    if (limit is None) is not (status == verdict_words.INFEASIBLE):
        node.fail(f"the status {status!r} does not go with its bound")
    own_gap = max(0.0, 1.0 - bound_s / minibatch_s) if found is not None and minibatch_s > 0 else 0.0
    if found is not None and (gap is None or abs(gap.number() - own_gap) > 1e-9):
        node.fail(f"its gap is not {own_gap!r}")
    if found is None and gap is not None:
        gap.fail("there is no gap without a plan")
    if status == verdict_words.OPTIMAL and own_gap > TOLERANCE:
        node.fail("its bound does not reach its pace, so it is not optimal")
    known_s = step_s if node["solver"].text() == RELAXATION else pace.pace_s if charged else pace.alone_s
    if bound_s > min(minibatch_s, known_s) * (1 + TOLERANCE):
        node.fail(f"its bound is {bound_s!r} s, but there is a plan that takes less")
    return SolverAnswer(node["solver"].text(), status, minibatch_s, bound_s, note, charged)


def _check_origin(node: Node, state: ProofState) -> None:
    """Raise an `InputError` where the bound is higher than any that the solvers' record and the shared cores give."""
    solvers = [answer.solver for answer in state.answers]
    if not solvers or len(set(solvers)) < len(solvers):
        node.fail("the record names no solver, or one of them twice")
    best = max(min(max(answer.bound_s for answer in state.answers), state.step_s), state.cores_s)
    if state.bound_s > best * (1 + TOLERANCE):
        node.fail(f"stated {state.bound_s!r}, but the record of the solvers gives {best!r}")
