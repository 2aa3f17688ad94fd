"""Reads a plan from `stages/stage-*.json`, and checks it before anything starts. Torch-free.

Every stage file repeats the fields that all stages share. So a file that was changed, lost or taken from another plan
is detected. Each problem is reported as a one-line `LaunchError`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, get_args

from msgspec import Meta, Struct

from pipeplan_launch.errors import LaunchError, nearest
from pipeplan_launch.files import FIELD, is_unchanged, read_file
from pipeplan_launch.job_reference import JobFile, located_reference
from pipeplan_launch.plan.launch_plan import (
    MAX_DEPTH,
    SHARDED,
    DataParallel,
    Depth,
    EmulatedStage,
    LaunchPlan,
    Prediction,
    StagePlacement,
)
from pipeplan_launch.plan.planned_links import LevelFields, planned_links
from pipeplan_launch.plan.schedule import SCHEDULES, Schedule
from pipeplan_launch.plan.schedule_check import replay_schedule
from pipeplan_launch.plan.virtual_stages import VirtualStages
from pipeplan_launch.typed_document import Natural, Positive, Text, decode, parse_json

Correction = Literal["none", "ef"]
CORRECTIONS: tuple[str, ...] = get_args(Correction)
"""The corrections of old gradients that a plan may name."""
STAGE_FORMAT = "pipeplan-stage"
STAGE_FORMAT_VERSION = 1
MAX_MINIBATCH = 10**7
MAX_REPLAYED_MINIBATCHES = 2000
"""Largest number of minibatches that the check of the schedule replays."""

_NAME = re.compile(r"stage-(\d+)\.json")


class ModelOfPlan(Struct):
    """The field `model`."""

    ref: str | None = None
    graph_hash: str | None = None
    granularity: Literal["module", "layer", "op"] = "layer"
    file: JobFile | None = None
    taken_whole: tuple[str, ...] = ()


class ScheduleFields(Struct):
    """The field `schedule`."""

    name: Text
    accumulate: Depth | None = None
    correction: Correction = "none"


class SharedFields(Struct, kw_only=True):
    """The fields that all stage files of a plan share."""

    plan: Text
    mode: Literal["training", "inference"]
    model: ModelOfPlan
    minibatch: Annotated[int, Meta(ge=1, le=MAX_MINIBATCH)]
    profile: str = ""
    device: Literal["cpu", "cuda"]
    servers: Depth
    workers_per_server: Depth
    server_sizes: Annotated[tuple[Positive, ...], Meta(min_length=1)] | None = None
    device_names: tuple[Text, ...] = ()
    schedule: ScheduleFields
    pipeline: Annotated[tuple[StagePlacement, ...], Meta(min_length=1)]
    links: Annotated[tuple[LevelFields, ...], Meta(min_length=1)] | None = None
    shard_optimizer: bool = False
    data_parallel: DataParallel = ""


class StageFile(SharedFields, kw_only=True):
    """A stage file."""

    format: Literal["pipeplan-stage"]
    version: Literal[1]
    checksum: str = ""
    stage: Natural
    layers: Annotated[tuple[str, ...], Meta(min_length=1)]
    prediction: Prediction | None = None
    emulation: EmulatedStage | None = None


def load_plan(folder: Path) -> LaunchPlan:
    """Read and check a plan folder. Raises `LaunchError`."""
    paths = _stage_files(folder)
    stages = {index: _read_stage_file(path) for index, path in sorted(paths.items())}
    first = stages[min(stages)]
    _check_complete(folder, paths, len(first.pipeline))
    for index, stage in stages.items():
        for name in SharedFields.__struct_fields__:
            if getattr(stage, name) != getattr(first, name):
                raise LaunchError(
                    f"{paths[index]} and {paths[0].name} disagree on {name!r}: they are of different plans"
                )
        if stage.stage != index:
            raise LaunchError(f"{paths[index]} is of stage {stage.stage}: it was renamed; solve again with --force")
    without = [paths[index] for index, stage in stages.items() if stage.emulation is None]
    if without and len(without) < len(stages):
        raise LaunchError(f"{without[0]} has no 'emulation', although other stages do")
    plan = _plan_of(list(stages.values()), folder, str(paths[0]))
    _check_workers(plan, str(folder))
    if first.links is not None:
        plan = replace(plan, links=planned_links(first.links, plan.world, str(paths[0])))
    counts = Counter(layer for layers in plan.layers for layer in layers)
    twice = [layer for layer, count in counts.items() if count > 1]
    if twice:
        raise LaunchError(f"{folder}: layer {twice[0]!r} is in more than one stage")
    _check_schedule(plan, str(folder))
    _check_data_parallel(plan, str(folder))
    return plan


def _plan_of(stages: Sequence[StageFile], folder: Path, where: str) -> LaunchPlan:
    """The plan that complete stage files describe, without its links. `where`: the first file."""
    first = stages[0]
    if not first.model.ref:
        raise LaunchError(f"{where}: the plan was made from a profile without a model, so there is nothing to run")
    schedule, sizes = _schedule(first.schedule, first.mode, where), first.server_sizes or ()
    if sizes and (len(sizes) != first.servers or max(sizes) > first.workers_per_server):
        expected = f"{first.servers} numbers of at most {first.workers_per_server}"
        raise LaunchError(f"{where}: server_sizes: expected {expected}, found {len(sizes)} up to {max(sizes)}")
    plan = LaunchPlan(
        plan=first.plan,
        mode=first.mode,
        model_ref=located_reference(first.model.ref, first.model.file, folder),
        graph_hash=first.model.graph_hash,
        minibatch=first.minibatch,
        device=first.device,
        servers=first.servers,
        workers_per_server=first.workers_per_server,
        schedule=schedule,
        pipeline=first.pipeline,
        layers=tuple(stage.layers for stage in stages),
        predictions=tuple(stage.prediction or Prediction() for stage in stages),
        server_sizes=sizes,
        device_names=first.device_names,
        accumulate=first.schedule.accumulate if schedule.accumulates else None,
        correction=first.schedule.correction,
        shard_optimizer=first.shard_optimizer or first.data_parallel == "zero1",
        data_parallel=first.data_parallel,
        granularity=first.model.granularity,
        taken_whole=first.model.taken_whole,
        profile=first.profile,
        model_file=first.model.file,
        emulated=tuple(stage.emulation for stage in stages if stage.emulation is not None),
    )
    if plan.device_names and len(plan.device_names) != plan.world:
        raise LaunchError(f"{where}: device_names: expected {plan.world}, found {len(plan.device_names)}")
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


def _read_stage_file(path: Path) -> StageFile:
    try:
        raw = read_file(path)
        content = parse_json(raw)
    except OSError as error:
        raise LaunchError(f"{path} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise LaunchError(f"{path} is damaged or truncated ({error}): solve again with --force") from error
    if not isinstance(content, dict) or content.get("format") != STAGE_FORMAT:
        raise LaunchError(f"{path} is not a stage file of a plan (its format is not {STAGE_FORMAT!r})")
    version = decode(content.get("version"), Positive, f"{path}: version")
    if version > STAGE_FORMAT_VERSION:
        raise LaunchError(
            f"{path} is of version {version}, newer than this pipeplan reads ({STAGE_FORMAT_VERSION}): upgrade pipeplan"
        )
    if FIELD in content and not is_unchanged(raw):
        raise LaunchError(
            f"{path} is not as it was written (its checksum differs): solve again with --force, or remove the checksum "
            "from a file that you have edited"
        )
    return decode(content, StageFile, str(path))


def _schedule(fields: ScheduleFields, mode: str, where: str) -> Schedule:
    name = fields.name
    if name not in SCHEDULES:
        raise LaunchError(f"{where}: this executor has no schedule {name!r}: {nearest(name, SCHEDULES)}")
    schedule = SCHEDULES[name]
    if schedule.trains != (mode == "training"):
        raise LaunchError(f"{where}: schedule {name!r} does not fit mode {mode!r}")
    if schedule.accumulates and fields.accumulate is None:
        raise LaunchError(f"{where}: schedule {name!r} needs 'accumulate', the minibatches per update")
    return schedule


def _check_workers(plan: LaunchPlan, where: str) -> None:
    if plan.world > MAX_DEPTH:
        raise LaunchError(f"{where}: the plan has {plan.world} workers; at most {MAX_DEPTH} are possible")
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


def _check_schedule(plan: LaunchPlan, where: str) -> None:
    """Replay a few rounds of the schedule, so that depths that would deadlock are found before training starts."""
    try:
        widest = max(shape.replicas for shape in plan.shapes)
        deepest = max(shape.replicas * shape.depth for shape in plan.shapes)
        rounds = 2 * max(deepest, plan.accumulate or 1) + widest
        replay_schedule(plan.schedule, plan.shapes, min(rounds, MAX_REPLAYED_MINIBATCHES))
    except ValueError as error:  # a ReplayError, or shapes that the schedule does not allow
        raise LaunchError(f"{where}: {error}; solve again with --force") from error


def _check_data_parallel(plan: LaunchPlan, where: str) -> None:
    """Raise `LaunchError` if the data-parallel engine cannot run a plan that names it."""
    name = plan.data_parallel
    if name != "ddp" and any(stage.shares for stage in plan.pipeline):
        raise LaunchError(f"{where}: unequal shares of a batch need data_parallel 'ddp': solve again with --force")
    if not name:
        return
    if len(plan.pipeline) > 1 or plan.schedule.name != "1f1b-flush":
        raise LaunchError(
            f"{where}: data_parallel {name!r} is for plans of one stage that train under 1f1b-flush, and this one has "
            f"{len(plan.pipeline)} stages under {plan.schedule.name}: solve again with --force"
        )
    if name in SHARDED and plan.emulated:
        raise LaunchError(f"{where}: a plan with data_parallel {name!r} cannot be emulated: emulate one without it")
    sizes = {len(workers) for workers in plan.workers_by_server(0)}
    if name == "hsdp" and len(sizes) > 1:
        raise LaunchError(
            f"{where}: data_parallel 'hsdp' needs as many workers on every server, and the plan has "
            f"{' and '.join(map(str, sorted(sizes)))}: solve again with --force"
        )
