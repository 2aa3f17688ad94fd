"""Runs all checks of a plan in order, and compares its stated cost with an independent computation."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from pipeplan.checker.batch import BatchParts, slowest_batches
from pipeplan.checker.certificates.certificate import CertifiedBound, check_certificate
from pipeplan.checker.claims import (
    CLOSE,
    NOT_SHOWN,
    ShownBound,
    check_claims,
    check_description,
    check_run_figures,
    check_step_time,
    equal,
    same,
)
from pipeplan.checker.data_parallel import exposed_allreduce_s
from pipeplan.checker.document import WHOLE, PlanDocument
from pipeplan.checker.figures import StageFigures, awaited_s, copies_allreduce_s, stage_figures, weight_versions
from pipeplan.checker.formulas import usable_of
from pipeplan.checker.model import CheckedModel, checked_model
from pipeplan.checker.step_time import ChargedStepTime, charged_step_time
from pipeplan.checker.structure import check_options, check_structure, outside_space
from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.util.files import Node
from pipeplan.util.units import show_size, show_time

NO_CERTIFICATE = "plan.json has no certificate"
FORMAT: Final = "pipeplan-check"
VERSION: Final = 1


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    what: str
    """The property that was checked."""
    holds: bool | None
    """Whether the property holds; None if plan.json states it and nothing in plan.json shows it."""
    text: str
    """A summary, or the reason why the property does not hold or is not shown."""

    @property
    def line(self) -> str:
        """The result as a line of text, such as `memory: ok, …`."""
        if self.holds is None:
            return f"{self.what}: {NOT_SHOWN}: {self.text}"
        return f"{self.what}: {'ok' if self.holds else 'wrong'}, {self.text}"


@dataclass(frozen=True)
class CheckedPlan:
    """The results of all checks, and what they establish about faster plans."""

    results: tuple[CheckResult, ...]
    shown: ShownBound | None
    """The bound that the certificate shows; None if there is no certificate, or if anything in plan.json is wrong."""

    @property
    def wrong(self) -> CheckResult | None:
        """The first check that failed, or None."""
        return next((result for result in self.results if result.holds is False), None)

    @property
    def proof(self) -> str:
        """A clause that says what is shown about faster plans."""
        if self.wrong is not None:
            return f"plan.json is wrong ({self.wrong.what}), so nothing that it claims to be proven is shown"
        if self.shown is None:
            return f"{NO_CERTIFICATE}, so how much faster another plan may be is {NOT_SHOWN}"
        return f"{self.shown.text}, as the certificate in plan.json shows"

    def document(self, plan: str) -> CheckDocument:
        """The document that `pipeplan check --json` prints for the plan.json at this path."""
        claims = [Claim(result.what, result.holds, result.text) for result in self.results]
        shown = ShownGap(self.shown.step_s, self.shown.bound_s, self.shown.gap) if self.shown is not None else None
        return CheckDocument(FORMAT, VERSION, plan, self.wrong is None, shown, claims)

    def holds(self, what: str) -> bool:
        """Whether the check with this name was made and found nothing wrong."""
        return any(result.what == what and result.holds for result in self.results)


class Claim(Struct, frozen=True):
    """A claim of plan.json, and whether it holds."""

    what: str
    holds: bool | None
    """null if nothing in plan.json shows the claim."""
    text: str


class ShownGap(Struct, frozen=True):
    """The bound that the certificate shows, in seconds per microbatch."""

    step_s: float
    bound_s: float
    """Lower bound on the step time of every plan of the searched space."""
    gap: Annotated[float, Meta(ge=0)]
    """`step_s / bound_s − 1`."""


class CheckDocument(Struct, frozen=True):
    """The schema of the output of `pipeplan check --json`."""

    format: Literal["pipeplan-check"]
    version: Literal[1]
    plan: str
    """The path of plan.json."""
    correct: bool
    """Whether no claim is wrong."""
    shown: ShownGap | None
    """null without a certificate, or if a claim is wrong."""
    claims: list[Claim]


def check_readable_plan(root: Node, profile: Profile) -> CheckedPlan:
    """`check_plan`, but an `InputError` becomes a result that the document is wrong."""
    try:
        return check_plan(root, profile)
    except InputError as error:
        return CheckedPlan((CheckResult("document", False, str(error)),), None)


def check_plan(root: Node, profile: Profile) -> CheckedPlan:
    """Check a plan.json against the profile that it was made from.

    Stops after the structure if it is wrong, because the other checks would have no meaning. Raises an `InputError` if
    plan.json is malformed or was made from another profile.
    """
    document = PlanDocument.of(root)
    if profile.digest() != document.digest:
        raise InputError("the profile is not the one that the plan was made from: their digests differ")
    model = checked_model(profile, document)
    structure = _try("structure", lambda: check_structure(document, model))
    if structure.holds is False:
        return CheckedPlan((structure,), None)
    figures, shown = stage_figures(document, model), list[CertifiedBound]()

    @cache
    def step_time() -> ChargedStepTime:
        return charged_step_time(document, model, figures)

    def optimality() -> str | None:
        if (bound := _certified(document, model)) is None:
            return None
        shown.append(bound)
        return f"{ShownBound(document.step_s, bound.bound_s).text}; states checked: {bound.states}"

    results = (
        structure,
        _try("constraints", lambda: check_options(document, model)),
        _try("formulas", lambda: check_formulas(document, model, figures, step_time())),
        _try("step time", lambda: check_step_time(document)),
        _try("run", lambda: check_run_figures(document, profile), "plan.json is older, and states nothing"),
        _try("stages", lambda: check_stages(document, model, figures)),
        _try("memory", lambda: check_memory(document, figures)),
        _try("description", lambda: check_description(document, profile, step_time().bound_by)),
        _try("optimality", optimality, NO_CERTIFICATE),
        _try(
            "verdict",
            lambda: check_claims(document, model, *shown),
            "it follows from the bound, which no certificate shows",
        ),
    )
    right = all(result.holds is not False for result in results)
    return CheckedPlan(results, ShownBound(document.step_s, shown[0].bound_s) if shown and right else None)


def _certified(document: PlanDocument, model: CheckedModel) -> CertifiedBound | None:
    """The bound that the certificate shows; None if there is no certificate.

    Raises an `InputError` if the certificate is wrong, or if the plan lies outside the space that it covers.
    """
    options = document.options
    if document.virtual or options.sharding != WHOLE or options.unequal_shares:
        if document.root.get("certificate") is not None:
            divided = "take unequal shares" if options.unequal_shares else "divide their state"
            kind = "workers run several stages" if document.virtual else f"replicas {divided}"
            raise InputError(f"no certificate speaks of plans whose {kind}")
        if document.virtual:
            return None
    if (outside := outside_space(document)) and _claims_proof(document):
        raise InputError(f"the plan lies outside the searched space, of which alone a proof speaks: {outside}")
    return check_certificate(document, model)


def _claims_proof(document: PlanDocument) -> bool:
    """Whether plan.json has a certificate, or calls its plan optimal or its verdict proven."""
    status, verdict = document.root.get("status"), document.root.get("verdict")
    proven = verdict.get("proven") if verdict else None
    return (
        document.root.get("certificate") is not None
        or (status is not None and status.value == "optimal")
        or (proven is not None and proven.value is True)
    )


def _try(what: str, check: Callable[[], str | None], unchecked: str = "") -> CheckResult:
    """The result of a check. `check` returns a summary, returns None if nothing shows the property, or raises an
    `InputError`.
    """
    try:
        text = check()
    except InputError as error:
        return CheckResult(what, False, str(error))
    return CheckResult(what, None, unchecked) if text is None else CheckResult(what, True, text)


def check_formulas(
    document: PlanDocument, model: CheckedModel, figures: tuple[StageFigures, ...], step_time: ChargedStepTime
) -> str:
    """Check that the step time by the formulas is the time of the slowest resource, and return it in words.

    Like the other checks of this module, it raises an `InputError` that names the wrong figure.
    """
    prediction, among = document.prediction, copies_allreduce_s(document, model)
    if document.flushes:
        _check_batch(document, model, figures)
    same(prediction["minibatch_s"], step_time.step_time_s)
    same(prediction["minibatches_per_s"], 1.0 / step_time.step_time_s)
    same(prediction["copies_synchronisation_s"], among / document.update_interval(document.copies))
    return f"{show_time(step_time.step_time_s)} for each minibatch by the formulas"


def check_stages(document: PlanDocument, model: CheckedModel, figures: tuple[StageFigures, ...]) -> str:
    """Check the stated times, bytes and weight versions of every stage."""
    for index, (node, figure) in enumerate(zip(_stage_nodes(document), figures, strict=True)):
        for key, value in (
            ("minibatch_s", document.step_time_s),
            ("forward_s", figure.forward_s),
            ("backward_s", figure.backward_s),
            # Plans written before the optimiser's step was charged do not have this field.
            *([("update_s", figure.update_s)] if figure.update_s or node.get("update_s") else []),
            *([("executor_s", figure.executor_s)] if figure.executor_s or node.get("executor_s") else []),
            ("sync_s", awaited_s(figures, index)),
            *([("weights_s", figure.weights_s)] if figure.weights_s or node.get("weights_s") else []),
            *([("exposed_sync_s", exposed_allreduce_s(document, model, index))] if node.get("exposed_sync_s") else []),
            ("receive_bytes", figure.received),
            ("send_bytes", figure.sent),
            ("send_gradient_bytes", figure.sent_gradient),
            ("receive_gradient_bytes", figure.received_gradient),
            ("parameter_bytes", figure.parameters),
        ):
            same(node[key], value)
        _same_bytes(node["minibatch_bytes"], figure.minibatch_bytes)
        # Plans written before a worker's own memory was charged do not state it.
        if (own := node.get("worker_bytes")) is not None:
            _same_bytes(own, document.cluster.executor.worker_bytes)
        stated, needed = document.stages[index].versions, weight_versions(document, index)
        if stated != needed:
            raise InputError(f"stage {index + 1} keeps {needed} versions of its weights, the plan says {stated}")
    return "times, traffic and versions of every stage"


def check_memory(document: PlanDocument, figures: tuple[StageFigures, ...]) -> str:
    """Check the stated memory, and that every stage fits, unless the plan was made to ignore the limit."""
    for node, figure in zip(_stage_nodes(document), figures, strict=True):
        _same_bytes(node["memory_bytes"], figure.memory_bytes)
    most = max(figure.memory_bytes for figure in figures)
    if not document.options.memory:
        return f"at most {show_size(most)}; the plan was to ignore the limit"
    for number, (stage, figure) in enumerate(zip(document.stages, figures, strict=True), start=1):
        capacity = min(usable_of(document.cluster.device_of(worker)) for worker in stage.workers)
        if figure.memory_bytes > capacity:
            needs, has = show_size(figure.memory_bytes), show_size(capacity)
            raise InputError(f"stage {number} needs {needs}, a device has {has} to use")
    return f"every stage fits; the largest takes {show_size(most)}"


def _stage_nodes(document: PlanDocument) -> list[Node]:
    """The stated figures of every stage."""
    nodes = document.prediction["stages"].items()
    if len(nodes) != len(document.stages):
        document.prediction["stages"].fail(f"expected {len(document.stages)}, one for each stage, found {len(nodes)}")
    return nodes


def _check_batch(document: PlanDocument, model: CheckedModel, figures: tuple[StageFigures, ...]) -> None:
    """Check the stated parts of a batch: they must be those of one of its longest paths."""
    stated, refusals = document.prediction["batch"], []
    for parts in slowest_batches(document, model, figures):
        try:
            _check_parts(stated, parts)
        except InputError as error:
            refusals.append(error)
        else:
            return
    raise refusals[0]


def _check_parts(stated: Node, parts: BatchParts) -> None:
    equal(stated["bound"], parts.bound)
    # A plan without waiting does not state the wait.
    optional = ("order_s",) if not parts.order_s and stated.get("order_s") is None else ()
    for key, value in vars(parts).items():
        if key not in ("bound", *optional) and math.isfinite(value):
            same(stated[key], value)


def _same_bytes(stated: Node, computed: float) -> None:
    """Raise an `InputError` unless a stated size is the computed size in whole bytes."""
    if abs(stated.number() - computed) > 1 + CLOSE * computed:
        stated.fail(f"stated {show_size(stated.number())}, found {show_size(computed)}")
