"""Reads a plan from `stages/stage-*.json`, and checks it before anything starts. Torch-free.

Every stage file repeats what all stages share, so that a file that was changed, lost or taken from another plan is
noticed. Each problem is reported as a one-line `LaunchError`.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeplan_launch.checked_json import FIELD, is_unchanged
from pipeplan_launch.errors import LaunchError, nearest
from pipeplan_launch.files import read_file
from pipeplan_launch.plan import json_fields
from pipeplan_launch.plan.launch_plan import LaunchPlan, Prediction, StagePlacement
from pipeplan_launch.plan.planned_links import read_planned_links
from pipeplan_launch.plan.schedule import SCHEDULES, Schedule
from pipeplan_launch.plan.schedule_check import replay_schedule
from pipeplan_launch.plan.sleeping_stage_spec import EmulatedStage, read_emulated_stage
from pipeplan_launch.plan.virtual_stages import VirtualStages

CORRECTIONS = ("none", "ef")
"""The corrections of old gradients that a plan may name."""
STAGE_FORMAT = "pipeplan-stage"
STAGE_FORMAT_VERSION = 1
MAX_DEPTH = 100_000
"""Largest depth and number of workers that is accepted; larger values are taken for damage."""
MAX_MINIBATCH = 10**7
MAX_REPLAYED_MINIBATCHES = 2000
"""Largest number of minibatches that the check of the schedule replays."""

_NAME = re.compile(r"stage-(\d+)\.json")
_SHARED_KEYS = (
    *("plan", "mode", "model", "minibatch", "profile", "device", "servers", "workers_per_server", "server_sizes"),
    *("schedule", "pipeline", "links"),
)


def load_plan(folder: Path) -> LaunchPlan:
    """Read and check a plan folder. Raises `LaunchError`."""
    files = _stage_files(folder)
    raw = {index: _read_stage_file(path) for index, path in files.items()}
    first = raw[0] if 0 in raw else raw[min(raw)]
    stages = json_fields.listing(first, "pipeline", str(files[min(raw)]))
    _check_complete(folder, files, len(stages))
    for index, content in raw.items():
        _check_agrees(files[0], first, files[index], content)
        if json_fields.integer(content, "stage", str(files[index]), least=0) != index:
            raise LaunchError(
                f"{files[index]} is of stage {content['stage']}: it was renamed; solve again with --force"
            )
    shared = _shared_fields(first, str(files[0]))
    plan = replace(
        shared,
        layers=tuple(json_fields.names(raw[index], "layers", str(files[index])) for index in range(len(stages))),
        predictions=tuple(_prediction(raw[index], str(files[index])) for index in range(len(stages))),
        emulated=_emulated([(raw[index], str(files[index])) for index in range(len(stages))]),
    )
    _check_workers(plan, str(folder))
    plan = replace(plan, links=read_planned_links(first, plan.world, str(files[0])))
    _check_layers(plan, str(folder))
    _check_schedule(plan, str(folder))
    return plan


def _stage_files(folder: Path) -> dict[int, Path]:
    stages = folder / "stages"
    if not stages.is_dir():
        raise LaunchError(f"{folder} is not a plan folder: it has no stages/ (`pipeplan solve` writes one)")
    files = {int(match[1]): path for path in stages.iterdir() if (match := _NAME.fullmatch(path.name))}
    if not files:
        raise LaunchError(f"{stages} holds no stage-0.json: solve again with --force")
    return files


def _check_complete(folder: Path, files: Mapping[int, Path], count: int) -> None:
    missing = [index for index in range(count) if index not in files]
    if missing:
        raise LaunchError(f"{folder}/stages/stage-{missing[0]}.json is missing: the plan has {count} stages")
    surplus = sorted(index for index in files if index >= count)
    if surplus:
        raise LaunchError(f"{files[surplus[0]]} does not belong to this plan, which has {count} stages")


def _read_stage_file(path: Path) -> dict[str, Any]:
    try:
        raw = read_file(path)
        content = json.loads(raw)
    except OSError as error:
        raise LaunchError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise LaunchError(f"{path} is damaged or truncated ({error}): solve again with --force") from error
    if not isinstance(content, dict) or content.get("format") != STAGE_FORMAT:
        raise LaunchError(f"{path} is not a stage file of a plan (its format is not {STAGE_FORMAT!r})")
    version = json_fields.integer(content, "version", str(path), least=1)
    if version > STAGE_FORMAT_VERSION:
        raise LaunchError(
            f"{path} is of version {version}, newer than this pipeplan reads ({STAGE_FORMAT_VERSION}): upgrade pipeplan"
        )
    if FIELD in content and not is_unchanged(raw):
        raise LaunchError(
            f"{path} is not as it was written (its checksum differs): solve again with --force, or remove the checksum "
            "from a file that you have edited"
        )
    return content


def _check_agrees(reference: Path, first: Mapping[str, Any], path: Path, content: Mapping[str, Any]) -> None:
    for key in _SHARED_KEYS:
        if content.get(key) != first.get(key):
            raise LaunchError(f"{path} and {reference.name} disagree on {key!r}: they are of different plans")


def _shared_fields(content: dict[str, Any], where: str) -> LaunchPlan:
    """The part of the plan that all stages share, from the content of one stage file."""
    model = json_fields.mapping(content, "model", where)
    mode = json_fields.choice(content, "mode", where, ("training", "inference"))
    if not isinstance(model.get("ref"), str) or not model["ref"]:
        raise LaunchError(f"{where}: the plan was made from a profile without a model, so there is nothing to run")
    graph_hash = model.get("graph_hash")
    if graph_hash is not None and not isinstance(graph_hash, str):
        raise LaunchError(f"{where}: model.graph_hash must be a string or null")
    schedule = _schedule(content, mode, where)
    granularity = json_fields.choice({"granularity": "layer"} | model, "granularity", where, ("module", "layer", "op"))
    return LaunchPlan(
        plan=json_fields.text(content, "plan", where),
        mode=mode,
        model_ref=model["ref"],
        graph_hash=graph_hash,
        minibatch=json_fields.integer(content, "minibatch", where, least=1, most=MAX_MINIBATCH),
        device=json_fields.choice(content, "device", where, ("cpu", "cuda")),
        servers=json_fields.integer(content, "servers", where, least=1, most=MAX_DEPTH),
        workers_per_server=json_fields.integer(content, "workers_per_server", where, least=1, most=MAX_DEPTH),
        schedule=schedule,
        pipeline=tuple(_placement(stage, where) for stage in json_fields.listing(content, "pipeline", where)),
        layers=(),
        predictions=(),
        server_sizes=_server_sizes(content, where),
        accumulate=_accumulate(content, schedule, where),
        correction=json_fields.choice(
            {"correction": "none"} | json_fields.mapping(content, "schedule", where), "correction", where, CORRECTIONS
        ),
        granularity=granularity,
        profile=str(content.get("profile", "")),
    )


def _server_sizes(content: dict[str, Any], where: str) -> tuple[int, ...]:
    """Workers on every server; () if all servers have the same number."""
    if content.get("server_sizes") is None:
        return ()
    sizes = json_fields.listing(content, "server_sizes", where)
    servers = json_fields.integer(content, "servers", where, least=1, most=MAX_DEPTH)
    most = json_fields.integer(content, "workers_per_server", where, least=1, most=MAX_DEPTH)
    if len(sizes) != servers or not all(type(size) is int and 1 <= size <= most for size in sizes):
        raise LaunchError(f"{where}: 'server_sizes' must be {servers} whole numbers from 1 to {most}")
    return tuple(sizes)


def _schedule(content: dict[str, Any], mode: str, where: str) -> Schedule:
    name = json_fields.text(json_fields.mapping(content, "schedule", where), "name", where)
    if name not in SCHEDULES:
        raise LaunchError(f"{where}: this executor has no schedule {name!r}: {nearest(name, SCHEDULES)}")
    schedule = SCHEDULES[name]
    if schedule.trains != (mode == "training"):
        raise LaunchError(f"{where}: schedule {name!r} does not fit mode {mode!r}")
    return schedule


def _accumulate(content: dict[str, Any], schedule: Schedule, where: str) -> int | None:
    if not schedule.accumulates:
        return None
    schedule_fields = json_fields.mapping(content, "schedule", where)
    if schedule_fields.get("accumulate") is None:
        raise LaunchError(f"{where}: schedule {schedule.name!r} needs 'accumulate', the minibatches per update")
    return json_fields.integer(schedule_fields, "accumulate", where, least=1, most=MAX_DEPTH)


def _placement(stage: Any, where: str) -> StagePlacement:
    if not isinstance(stage, dict):
        raise LaunchError(f"{where}: every stage of the pipeline must be an object")
    workers = json_fields.listing(stage, "workers", where)
    if not all(isinstance(worker, int) and not isinstance(worker, bool) for worker in workers):
        raise LaunchError(f"{where}: workers must be whole numbers, not {workers!r}")
    recompute = stage.get("recompute", False)
    if not isinstance(recompute, bool):
        raise LaunchError(f"{where}: 'recompute' must be true or false, not {recompute!r}")
    return StagePlacement(
        tuple(workers),
        json_fields.integer(stage, "depth", where, least=1, most=MAX_DEPTH),
        json_fields.integer(stage, "versions", where, least=1, most=MAX_DEPTH),
        recompute,
        json_fields.integer(stage, "deferred", where, least=0, most=MAX_DEPTH) if "deferred" in stage else 0,
    )


def _prediction(content: dict[str, Any], where: str) -> Prediction:
    predicted = content.get("prediction") or {}
    if not isinstance(predicted, dict):
        raise LaunchError(f"{where}: prediction must be an object")
    amounts = {
        name: json_fields.amount(predicted, name, where)
        for name in Prediction.__dataclass_fields__
        if name in predicted
    }
    return Prediction(**amounts)


def _emulated(stages: Sequence[tuple[dict[str, Any], str]]) -> tuple[EmulatedStage, ...]:
    parsed = [read_emulated_stage(content, where) for content, where in stages]
    emulated = tuple(stage for stage in parsed if stage is not None)
    if emulated and len(emulated) < len(parsed):
        raise LaunchError(f"{stages[parsed.index(None)][1]} has no 'emulation', although other stages do")
    return emulated


def _check_workers(plan: LaunchPlan, where: str) -> None:
    counts = Counter(worker for stage in plan.pipeline for worker in stage.workers)
    shared = sorted(worker for worker, count in counts.items() if count > 1)
    if plan.schedule.virtual is not None:
        _check_devices(plan, plan.schedule.virtual, where)
    elif shared:
        raise LaunchError(f"{where}: worker {shared[0]} is in more than one place of the plan: stages must not overlap")
    outside = sorted(worker for worker in counts if not 0 <= worker < plan.world)
    if outside:
        raise LaunchError(
            f"{where}: worker {outside[0]} does not exist: {plan.servers} servers of "
            f"{', '.join(map(str, plan.server_sizes)) or plan.workers_per_server} workers have workers 0 to "
            f"{plan.world - 1}"
        )


def _check_devices(plan: LaunchPlan, virtual: VirtualStages, where: str) -> None:
    """Raise `LaunchError` unless the workers of the stages are placed as the schedule says."""
    devices, stages = plan.device_workers, len(plan.pipeline)
    name, workers = plan.schedule.name, [worker for device in devices for worker in device]
    if len(set(workers)) != len(workers):
        raise LaunchError(f"{where}: under {name}, stages have the same workers or none in common")
    if len({len(device) for device in devices}) > 1:
        raise LaunchError(f"{where}: under {name}, all stages have the same number of replicas")
    if (refusal := virtual.refusal(stages, len(devices))) is not None:
        raise LaunchError(f"{where}: under {name}, {refusal}")
    for stage, placement in enumerate(plan.pipeline):
        device = virtual.device_of(stage, len(devices))
        if placement.workers != devices[device]:
            raise LaunchError(f"{where}: under {name}, stage {stage} belongs to workers {list(devices[device])}")


def _check_layers(plan: LaunchPlan, where: str) -> None:
    counts = Counter(layer for stage in plan.layers for layer in stage)
    twice = [layer for layer, count in counts.items() if count > 1]
    if twice:
        raise LaunchError(f"{where}: layer {twice[0]!r} is in more than one stage")


def _check_schedule(plan: LaunchPlan, where: str) -> None:
    """Replay a few rounds of the schedule, so that depths that would deadlock are found before training starts."""
    widest = max(shape.replicas for shape in plan.shapes)
    deepest = max(shape.replicas * shape.depth for shape in plan.shapes)
    rounds = 2 * max(deepest, plan.accumulate or 1) + widest
    try:
        replay_schedule(plan.schedule, plan.shapes, min(rounds, MAX_REPLAYED_MINIBATCHES))
    except ValueError as error:  # a ReplayError, or shapes that the schedule does not allow
        raise LaunchError(f"{where}: {error}; solve again with --force") from error
