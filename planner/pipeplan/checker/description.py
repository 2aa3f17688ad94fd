"""Checks what plan.json says about itself: its model, its configuration and its slowest resource."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields

from pipeplan.checker.document import FLUSH, FLUSHING, STASHING, WHOLE, CheckedOptions, CheckedStage, PlanDocument
from pipeplan.checker.figures import StageFigures
from pipeplan.checker.pace import ChargedPace
from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.util.files import Node
from pipeplan_launch.job_reference import portable_reference

VERSION = re.compile(r"[0-9]+(\.[0-9]+){1,3}([-+.]?[a-z0-9]{1,16}){0,4}", re.ASCII)
"""Versions of pipeplan, as plan.json states the one that wrote it."""


def check_description(
    document: PlanDocument, profile: Profile, pace: ChargedPace, figures: Sequence[StageFigures]
) -> str:
    """Check the words, and return a summary. Raises an `InputError` that names the first field that is wrong."""
    if not VERSION.fullmatch(document.root["pipeplan"].text()):
        document.root["pipeplan"].fail("it is no version of pipeplan")
    _check_profile(document.root["profile"], profile)
    _check_options(document)
    if (data_parallel := document.root.get("data_parallel")) is not None:
        _expect(data_parallel, _data_parallel(document))
    plan = document.root["plan"]
    _expect(plan["config"], configuration(document.stages, document.copies))
    prediction = document.prediction
    _expect_one(prediction["bound_by"], pace.bound_by)
    batch = prediction.get("batch")
    if (batch is None) is (document.schedule in FLUSHING):
        prediction.fail(f"the parts of a batch, `batch`, do not go with the schedule {document.schedule}")
    return f"{plan['config'].text()}, bound by {prediction['bound_by'].text()}"


def _data_parallel(document: PlanDocument) -> str:
    """How the executor trains the whole model on every worker; empty where it does not."""
    busy = {worker for stage in document.stages for worker in stage.workers}
    if len(document.stages) > 1 or len(busy) == 1 or document.schedule != FLUSH:
        return ""
    return "ddp" if document.options.sharding == WHOLE else document.options.sharding


def configuration(stages: Sequence[CheckedStage], copies: int) -> str:
    """Replica counts from input to output, such as `15-1`, or `4×(1-1)` for four copies of a pipeline.

    Where workers run several stages, the counts are those of the devices: `8-8 × 2 stages`.
    """
    devices = tuple(dict.fromkeys(stage.workers for stage in stages))
    if len(devices) < len(stages):  # workers run several stages each
        return f"{'-'.join(str(len(workers)) for workers in devices)} × {len(stages) // len(devices)} stages"
    counts = "-".join(str(len(stage.workers) // copies) for stage in stages)
    return counts if copies == 1 else f"{copies}×({counts})"


def _check_profile(node: Node, profile: Profile) -> None:
    origin = profile.provenance
    for key, value in (("model", profile.model_name), ("kind", origin.kind)):
        _expect(node[key], value)
    _expect_reference(node["ref"], profile)
    _expect(node["how"], origin.how)
    for key, count in (("minibatch", profile.minibatch), ("threads", origin.threads)):
        if node[key].integer() != count:
            node[key].fail(f"stated {node[key].value!r}, found {count}")


def _check_options(document: PlanDocument) -> None:
    """Raise an `InputError` where the options name another schedule than the plan has, or something unknown."""
    node = document.root["options"]
    known = {field.name for field in fields(CheckedOptions)}
    node.refuse_others({*known, "inference", "schedule", "accumulate", "several", "shard_optimizer"})
    if (several := node.get("several")) is not None and several.boolean():
        several.fail("plan.json never asks for several stages by this option")
    inference, schedule, accumulate = node.get("inference"), node.get("schedule"), node.get("accumulate")
    if (inference.boolean() if inference else False) != document.inference:
        node.fail("`inference` is not that of the plan")
    # The options of a plan for inference keep the default of training, which does not count.
    if (schedule.text() if schedule else STASHING) != (STASHING if document.inference else document.schedule):
        node.fail("`schedule` is not that of the plan")
    if (accumulate.integer(minimum=1) if accumulate else None) != document.accumulate:
        node.fail("`accumulate` is not that of the plan")


def _expect_reference(node: Node, profile: Profile) -> None:
    """The file of a job is told by its content, which the profile's digest covers, so its folder may differ."""
    if profile.model_file is None:
        _expect(node, profile.model_ref)
    elif portable_reference(node.text()) != portable_reference(profile.model_ref):
        node.fail(f"stated {node.value!r}, found {profile.model_ref!r}")


def _expect(node: Node, found: str) -> None:
    if node.text() != found:
        raise InputError(f"{node.where}: stated {node.value!r}, found {found!r}")


def _expect_one(node: Node, found: Iterable[str]) -> None:
    if node.text() not in found:
        raise InputError(f"{node.where}: stated {node.value!r}, found {' or '.join(sorted(found))}")
