"""Runs all checks of a plan in order, and compares its stated cost with an independent computation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.checker.certificate import check_certificate
from pipeplan.checker.ddp_overlap import ddp_pace, exposed_allreduce_s
from pipeplan.checker.document import FLUSHING, PlanDocument
from pipeplan.checker.figures import ROUNDING, StageFigures, copies_allreduce_s, stage_figures, weight_versions
from pipeplan.checker.model import CheckedModel, checked_model
from pipeplan.checker.pace import batch_parts, steady_pace, update_interval
from pipeplan.checker.shared_cards import busiest_card_s, busiest_cores_s
from pipeplan.checker.structure import check_options, check_structure
from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.util.files import Node
from pipeplan.util.units import show_size, show_time

CLOSE = 1e-9
"""Relative tolerance: adding in another order changes a sum by far less, any wrong figure by far more."""


@dataclass(frozen=True)
class CheckResult:
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


def verify_plan(root: Node, profile: Profile) -> list[CheckResult]:
    """Check a plan.json against the profile that it was made from.

    Stops after the structure where that is wrong, because the other checks would be meaningless. Raises an `InputError`
    where plan.json is malformed or was made from another profile.
    """
    document = PlanDocument.of(root)
    if profile.digest() != document.digest:
        raise InputError("the profile is not the one that the plan was made from: their digests differ")
    every = document.accumulate or 1 if document.accumulates else 1
    model = checked_model(profile, document.options, inference=document.inference, update_every=every)
    results = [_try("structure", lambda: check_structure(document, model))]
    if results[0].holds is False:
        return results
    results.append(_try("constraints", lambda: check_options(document, model)))
    costs = stage_figures(document, model)
    results.append(_try("pace", lambda: check_pace(document, model, costs)))
    results.append(_try("stages", lambda: check_stages(document, model, costs)))
    results.append(_try("memory", lambda: check_memory(document, costs)))
    results.append(_try("optimality", lambda: check_certificate(document, model), _reason(document)))
    return results


def _try(what: str, check: Callable[[], str | None], unchecked: str = "") -> CheckResult:
    """The result of a check that returns its summary, or None where it could not check, or raises an `InputError`."""
    try:
        text = check()
    except InputError as error:
        return CheckResult(what, False, str(error))
    return CheckResult(what, None, unchecked) if text is None else CheckResult(what, True, text)


def _reason(document: PlanDocument) -> str:
    """The reason why a plan has no certificate."""
    note = document.root.get("certificate_note")
    return note.text() if note else "plan.json has no certificate"


def check_pace(document: PlanDocument, model: CheckedModel, figures: tuple[StageFigures, ...]) -> str:
    """Check that the stated pace is that of the slowest resource, and return it in words.

    Raises an `InputError` that names the wrong figure; so do the other checks of this module.
    """
    prediction, among = document.prediction, copies_allreduce_s(document, model)
    interval = update_interval(document)
    if document.schedule in FLUSHING:
        pace = _check_batch(document, figures, among) / interval
    else:
        pace = steady_pace(document, figures, among)
        awaited = ddp_pace(document, model, figures)
        pace = awaited if awaited > pace * (1 + ROUNDING) else pace
    _finite(pace)
    if document.options.contention:
        shared = busiest_card_s(document, figures)
        if shared is None:
            raise InputError("the replicas of the stages are too many to add up what each network card carries")
        shared = max(shared, busiest_cores_s(document, figures))
        # A card with a single user has the load of that user, up to rounding.
        pace = shared if shared > pace * (1 + ROUNDING) else pace
    _same(prediction["minibatch_s"], pace)
    _same(prediction["minibatches_per_s"], 1.0 / pace)
    _same(prediction["copies_synchronisation_s"], among / interval)
    return f"{show_time(pace)} for each minibatch"


def check_stages(document: PlanDocument, model: CheckedModel, figures: tuple[StageFigures, ...]) -> str:
    """Check the stated times, bytes and weight versions of every stage."""
    nodes = document.prediction["stages"].items()
    if len(nodes) != len(figures):
        document.prediction["stages"].fail(f"expected {len(figures)}, one for each stage, found {len(nodes)}")
    for index, (node, figure) in enumerate(zip(nodes, figures, strict=True)):
        for key, value in (
            ("minibatch_s", document.pace_s),
            ("forward_s", figure.forward_s),
            ("backward_s", figure.backward_s),
            # Plans written before the optimiser's step was charged do not have this field.
            *([("update_s", figure.update_s)] if figure.update_s or node.get("update_s") else []),
            ("sync_s", figure.group_s),
            *([("exposed_sync_s", exposed_allreduce_s(document, model))] if node.get("exposed_sync_s") else []),
            ("receive_bytes", figure.received),
            ("send_bytes", figure.sent),
            ("send_gradient_bytes", figure.sent_gradient),
            ("receive_gradient_bytes", figure.received_gradient),
            ("parameter_bytes", figure.parameters),
            ("minibatch_bytes", figure.minibatch_bytes),
        ):
            _same(node[key], value)
        stated, needed = document.stages[index].versions, weight_versions(document, index)
        if stated != needed:
            raise InputError(f"stage {index + 1} keeps {needed} versions of its weights, the plan says {stated}")
    return "times, traffic and versions of every stage"


def check_memory(document: PlanDocument, figures: tuple[StageFigures, ...]) -> str:
    """Check the stated memory, and that it suffices unless the plan was made to ignore the limit."""
    for node, figure in zip(document.prediction["stages"].items(), figures, strict=True):
        stated = node["memory_bytes"]
        # The plan states whole bytes.
        if abs(stated.number() - figure.memory_bytes) > 1 + CLOSE * figure.memory_bytes:
            stated.fail(f"stated {show_size(stated.number())}, found {show_size(figure.memory_bytes)}")
    most = max(figure.memory_bytes for figure in figures)
    if not document.options.memory:
        return f"at most {show_size(most)}; the plan was to ignore the limit"
    for number, (stage, figure) in enumerate(zip(document.stages, figures, strict=True), start=1):
        capacity = min(document.cluster.device_of(worker).memory_bytes for worker in stage.workers)
        if figure.memory_bytes > capacity:
            needs, has = show_size(figure.memory_bytes), show_size(capacity)
            raise InputError(f"stage {number} needs {needs}, a device has {has}")
    return f"every stage fits; the largest takes {show_size(most)}"


def _check_batch(document: PlanDocument, figures: tuple[StageFigures, ...], among_s: float) -> float:
    """Check the stated parts of a batch, and return its total time in seconds."""
    stated, parts = document.prediction["batch"], batch_parts(document, figures, among_s)
    _finite(parts.total_s)
    for key, value in vars(parts).items():
        _same(stated[key], value)
    return parts.total_s


def _finite(pace_s: float) -> None:
    if math.isinf(pace_s):
        raise InputError("a stage has too few minibatches in flight to keep any pace")


def _same(stated: Node, computed: float) -> None:
    """Raise an `InputError` unless a stated figure equals the computed one, up to rounding."""
    value = stated.number()
    if not abs(value - computed) <= CLOSE * max(abs(computed), abs(value)):
        stated.fail(f"stated {value!r}, found {computed!r}")
