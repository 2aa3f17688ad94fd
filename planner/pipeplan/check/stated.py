"""Checks the cost that plan.json states against an independent computation."""

from __future__ import annotations

import math

from pipeplan.check.awaited import awaited_pace, exposed_s
from pipeplan.check.cards import busiest_s, cores_s
from pipeplan.check.document import FLUSHING, Document
from pipeplan.check.figures import Figures, among_copies_s, versions
from pipeplan.check.formulas import WHOLE
from pipeplan.check.model import Model
from pipeplan.check.pace import batch, steady_pace, update_interval
from pipeplan.errors import InputError
from pipeplan.files import Node
from pipeplan.units import show_size, show_time

CLOSE = 1e-9
"""Relative tolerance: adding in another order changes a sum by far less, any wrong figure by far more."""


def check_pace(document: Document, model: Model, figures: tuple[Figures, ...]) -> str:
    """Check that the stated pace is that of the slowest resource, and return it in words.

    Raises an `InputError` that names the wrong figure; so do the other checks of this module.
    """
    prediction, among = document.prediction, among_copies_s(document, model)
    interval = update_interval(document)
    if document.schedule in FLUSHING:
        pace = _check_batch(document, figures, among) / interval
    else:
        pace = steady_pace(document, figures, among)
        awaited = awaited_pace(document, model, figures)
        pace = awaited if awaited > pace * (1 + WHOLE) else pace
    _finite(pace)
    if document.asked.contention:
        shared = busiest_s(document, figures)
        if shared is None:
            raise InputError("the replicas of the stages are too many to add up what each network card carries")
        shared = max(shared, cores_s(document, figures))
        # A card with a single user has the load of that user, up to rounding.
        pace = shared if shared > pace * (1 + WHOLE) else pace
    _same(prediction["minibatch_s"], pace)
    _same(prediction["minibatches_per_s"], 1.0 / pace)
    _same(prediction["copies_synchronisation_s"], among / interval)
    return f"{show_time(pace)} for each minibatch"


def check_stages(document: Document, model: Model, figures: tuple[Figures, ...]) -> str:
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
            *([("exposed_sync_s", exposed_s(document, model))] if node.get("exposed_sync_s") else []),
            ("receive_bytes", figure.received),
            ("send_bytes", figure.sent),
            ("send_gradient_bytes", figure.sent_gradient),
            ("receive_gradient_bytes", figure.received_gradient),
            ("parameter_bytes", figure.parameters),
            ("minibatch_bytes", figure.minibatch_bytes),
        ):
            _same(node[key], value)
        stated, needed = document.stages[index].versions, versions(document, index)
        if stated != needed:
            raise InputError(f"stage {index + 1} keeps {needed} versions of its weights, the plan says {stated}")
    return "times, traffic and versions of every stage"


def check_memory(document: Document, figures: tuple[Figures, ...]) -> str:
    """Check the stated memory, and that it suffices unless the plan was made to ignore the limit."""
    for node, figure in zip(document.prediction["stages"].items(), figures, strict=True):
        stated = node["memory_bytes"]
        # The plan states whole bytes.
        if abs(stated.number() - figure.memory_bytes) > 1 + CLOSE * figure.memory_bytes:
            stated.fail(f"stated {show_size(stated.number())}, found {show_size(figure.memory_bytes)}")
    most = max(figure.memory_bytes for figure in figures)
    if not document.asked.memory:
        return f"at most {show_size(most)}; the plan was to ignore the limit"
    for number, (stage, figure) in enumerate(zip(document.stages, figures, strict=True), start=1):
        capacity = min(document.cluster.device_of(worker).memory_bytes for worker in stage.workers)
        if figure.memory_bytes > capacity:
            needs, has = show_size(figure.memory_bytes), show_size(capacity)
            raise InputError(f"stage {number} needs {needs}, a device has {has}")
    return f"every stage fits; the largest takes {show_size(most)}"


def _check_batch(document: Document, figures: tuple[Figures, ...], among_s: float) -> float:
    """Check the stated parts of a batch, and return its total time in seconds."""
    stated, parts = document.prediction["batch"], batch(document, figures, among_s)
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
