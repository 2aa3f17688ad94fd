"""Builds the stage of one worker: traces the whole model, and keeps only the worker's own stage of it."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipeplan_launch.checkpoint.manifest import MODEL_PREFIX
from pipeplan_launch.checkpoint.tensor_store import frozen_checksums
from pipeplan_launch.comm.ordered_transport import AnyTransport, OrderedTransport
from pipeplan_launch.comm.p2p import Mailbox, Transport
from pipeplan_launch.elastic.consistency_check import Fingerprint, digest
from pipeplan_launch.elastic.process_groups import Groups, device_of, wait_for
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Data, Job
from pipeplan_launch.job.loading import load_job
from pipeplan_launch.job.user_code import user_code_errors
from pipeplan_launch.job_reference import job_file
from pipeplan_launch.models.sleeping_stage import load_emulated_stages
from pipeplan_launch.plan.launch_plan import SHARDED, LaunchPlan
from pipeplan_launch.plan.run_options import (
    AS_PLANNED,
    AUTO,
    BFLOAT16,
    EXACT_AVERAGING,
    GradientAveraging,
    StalenessOptions,
)
from pipeplan_launch.runtime.data import (
    MinibatchSizes,
    check_order,
    data_fingerprint,
    minibatch_fingerprint,
    minibatch_sizes,
    order_of_samples,
)
from pipeplan_launch.runtime.engine import StageContext
from pipeplan_launch.runtime.inference import ForwardEngine
from pipeplan_launch.runtime.pipeline_training import PipelineTraining
from pipeplan_launch.runtime.self_check.self_check import check_at_start, say_unchecked
from pipeplan_launch.runtime.training import TrainingEngine
from pipeplan_launch.telemetry.recorder import Recorder
from pipeplan_launch.telemetry.run_folder import recorded_name
from pipeplan_launch.tracing.split import StageProgram, build_stage_program
from pipeplan_launch.tracing.subgraph import Program
from pipeplan_launch.tracing.trace import TracedModel, trace_job


@dataclass(frozen=True)
class RunOptions:
    """Options from the command line."""

    plan_folder: Path
    epochs: int | None = None
    """Total number of epochs; for inference, passes over the data."""
    resume: bool = False
    run_dir: Path | None = None
    seed: int | None = None
    weights: Path | None = None
    """A checkpoint or run folder, of any plan for the same model, whose weights training starts from."""
    self_check: bool = True
    """Whether to compare two training steps of the model alone with the plan's stages before training."""
    log_every: int = 20
    threads: int | None = None
    checkpoint_every: int = 1
    """Epochs between two checkpoints."""
    checkpoint_minibatches: int | None = None
    """Minibatches between two further checkpoints within an epoch."""
    evaluate_every: int = 1
    """Epochs between two evaluations."""
    resume_from: Path | None = None
    """A checkpoint or run folder, of any plan for the same model, from which training resumes in a new run folder."""
    max_minibatches: int | None = None
    """Largest number of minibatches of an epoch."""
    stop_on_nan: bool = True
    """Whether training ends at the first loss that is not finite."""
    timeout_s: float = 600.0
    probe_s: float = 2.0
    """Time for measuring links between servers before training, in seconds; 0 for no measurement."""
    averaging: GradientAveraging = EXACT_AVERAGING
    """Averaging of gradients among the replicas of a stage."""
    staleness: StalenessOptions = AS_PLANNED
    """Options for gradients that are some updates old."""
    transport: str = AUTO
    """Transport of messages between stages: `auto`, or one of `run_options.MODES`."""
    compile_backend: str | None = None
    """The backend of torch.compile that compiles the stages; None for none."""

    def runs_own_module(self, plan: LaunchPlan) -> bool:
        """Whether the data-parallel engine trains the user's own module. With options that only the pipeline engine
        knows, DDP runs as a pipeline of one traced stage.
        """
        if plan.data_parallel in SHARDED:
            return True  # `check_averaging_options` has refused these options
        averaging = self.averaging
        thin = averaging.compression is not None and averaging.compression.kind != BFLOAT16
        traced = thin or averaging.significance or self.compile_backend or plan.emulated
        return bool(plan.data_parallel) and not traced


@dataclass(frozen=True)
class WorkerStage:
    """A worker that is ready to run its stage."""

    place: StageContext
    data: Data
    training: TrainingEngine | None
    forward: ForwardEngine
    train_sizes: MinibatchSizes | None
    test_sizes: MinibatchSizes | None
    graph_hash: str
    fingerprint: Fingerprint
    frozen: Mapping[str, int]
    """Checksums of the frozen weights as the job builds them, by name in a checkpoint."""
    earlier: tuple[WorkerStage, ...] = ()
    """The worker's other stages, which come before this stage; () if it runs only one."""

    @property
    def every(self) -> tuple[WorkerStage, ...]:
        """All stages of the worker, in the order of the pipeline."""
        return *self.earlier, self


ModelCheck = Callable[[LaunchPlan, Job, TracedModel, int], None]
"""A check of the whole model, given the plan, the job, the traced model and the seed of the run."""


class Engines:
    """Loads the stages of a worker, and builds the pipeline engines that run them."""

    def __init__(self, options: RunOptions, groups: Groups) -> None:
        self._options, self._groups = options, groups

    def load(
        self, plan: LaunchPlan, stages: Sequence[int], seed: int, device: torch.device
    ) -> tuple[Job, list[Program], str, bool]:
        """`load_stages`, with the self-check at the first worker. Stages are compiled after the check."""
        options = self._options
        check = check_at_start if options.self_check else say_unchecked
        is_first = dist.get_rank() == plan.active[0]  # the other workers wait for its check
        job, programs, graph_hash, dynamic = load_stages(plan, stages, seed, device, check if is_first else None)
        for program in programs:
            if options.compile_backend is not None and isinstance(program, StageProgram):  # not an emulated stage
                program.compile_with(options.compile_backend)
        return job, programs, graph_hash, dynamic

    def training(self, place: StageContext, transport: AnyTransport, recorder: Recorder) -> TrainingEngine:
        """The engine that trains a stage."""
        options, groups = self._options, self._groups
        arguments = groups.replicas, options.averaging, groups.flush, options.staleness
        return PipelineTraining(place, transport, recorder, *arguments)

    def forward(
        self, place: StageContext, transport: AnyTransport, recorder: Recorder, _training: TrainingEngine | None
    ) -> ForwardEngine:
        """The engine that evaluates a stage. `_training`: the engine that trains the stage, if it is trained."""
        return ForwardEngine(place, transport, recorder)


@contextmanager
def one_garbage_collection() -> Iterator[None]:
    """Context that collects garbage once at its end, and exempts all objects that exist then from later collections.

    Imports make hundreds of thousands of permanent objects. Without this context, Python scans them several times
    during the imports (half a second in total), and later pauses training for a fifth of a second now and then.
    """
    gc.disable()
    try:
        gc.freeze()
        yield
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()


@one_garbage_collection()
def load_stages(
    plan: LaunchPlan, stages: Sequence[int], seed: int, device: torch.device, check: ModelCheck | None = None
) -> tuple[Job, list[Program], str, bool]:
    """(job without its model, the stages' programs, graph hash, whether they run at any batch size).

    An emulated stage is built from its file. Otherwise every worker builds the whole model from the same seed, and
    keeps only the parameters of its own stages. `check` is called before the parameters move to `device`.
    """
    if plan.emulated:
        job, emulated = load_emulated_stages({stage: plan.emulated[stage] for stage in stages})
        return job, [*emulated], "emulated", True
    importlib.import_module("torch._dynamo")  # otherwise tracing would import it later
    job = load_job(plan.model_ref, seed)
    if plan.mode == "training" and job.data is not None:
        job = with_data(job, plan.minibatch)
    traced = trace_job(job, plan.minibatch, plan.granularity, plan.taken_whole)
    if plan.graph_hash is not None and plan.graph_hash != traced.graph_hash:
        raise LaunchError(
            f"the model {plan.model_ref!r} is not the one that the plan was made for (its graph is "
            f"{traced.graph_hash[:19]}…, the plan's is {plan.graph_hash[:19]}…): profile and solve again"
        )
    _check_written_parameters(plan, traced.written_parameters)
    if check is not None:
        check(plan, job, traced, seed)
    programs: list[Program] = []
    for stage in stages:
        program = build_stage_program(traced, plan.layers, stage, device)
        _check_shared(plan, program)
        programs.append(program)
    if traced.loss_state is not None and len(plan.pipeline) - 1 not in stages:
        traced.loss_state.release()
    graph_hash, dynamic = traced.graph_hash, traced.dynamic_batch
    return replace(job, model=nn.Module()), programs, graph_hash, dynamic


def _check_written_parameters(plan: LaunchPlan, names: Sequence[str]) -> None:
    """Raise `LaunchError` if forward() writes trained parameters and the plan would lose such writes."""
    is_plain = all(len(stage.workers) == 1 and not stage.recompute for stage in plan.pipeline)
    if plan.mode != "training" or not names or (plan.schedule.flushes and is_plain):
        return
    raise LaunchError(
        f"forward() changes the trained parameter {names[0]!r}, of which this plan has several versions or copies, or "
        "runs forward() twice: solve with --schedule 1f1b-flush --max-replicas 1 --no-recompute, or change the weights "
        "after each update, in an optimiser of your own"
    )


def _check_shared(plan: LaunchPlan, program: Program) -> None:
    """Raise `LaunchError` if stages share parameters under a schedule that does not sum their gradients."""
    virtual = plan.schedule.virtual is not None
    if plan.mode != "training" or (plan.schedule.flushes and not virtual):
        return
    if virtual and program.shared:
        name, stages = next(iter(program.shared.items()))
        raise LaunchError(
            f"stages {', '.join(map(str, stages))} share the parameter {name!r}, which {plan.schedule.name} cannot do "
            "yet: solve with --schedule 1f1b-flush, or for a plan with its layers in one stage"
        )
    for name, stages in program.shared.items():
        raise LaunchError(
            f"stages {', '.join(map(str, stages))} share the parameter {name!r}, and {plan.schedule.name} updates them "
            "at different times: solve with --schedule 1f1b-flush or gpipe, or for a plan with its layers in one stage"
        )


def with_data(job: Job, minibatch: int) -> Job:
    """The job with its data sets already built. Refuses a minibatch larger than the data before tracing allocates
    memory for it.
    """
    with user_code_errors("the job's data"):
        data = job.datasets
        samples = len(data.train) if hasattr(data.train, "__len__") else None
    if samples is not None and 0 < samples < minibatch:
        raise LaunchError(
            f"the plan's minibatch of {minibatch} is larger than the job's training data ({samples} samples): "
            "solve or profile with a smaller --microbatch"
        )
    return replace(job, data=lambda: data)


def build_stage(
    options: RunOptions, plan: LaunchPlan, groups: Groups, seed: int, run: Path, engines: Engines
) -> WorkerStage:
    """Build the stage of an active worker, with its engines and data; the last stage if it runs several.

    Raises `LaunchError`.
    """
    rank, device = dist.get_rank(), device_of(plan)
    places = plan.places(rank)
    numbers = [stage for stage, _ in places]
    job, programs, graph_hash, dynamic = engines.load(plan, numbers, seed, device)
    if job.data is None:
        raise LaunchError(f"{plan.model_ref!r} has no data to run on: return Job(model, data=...)")
    with user_code_errors("the job's data"):
        data = job.datasets
    trains = plan.mode == "training"
    limit = options.max_minibatches
    test: Any = data.test if data.test is not None or trains else data.train
    if trains and hasattr(test, "__len__") and len(test) == 0:
        test = None  # training needs none
    if test is not None:
        # Fails now, and not after the first epoch, if the model cannot be evaluated stage by stage.
        for program in programs:
            program.eval()
            program.train()
    ordered: Any = data.train if data.order is None or not trains else order_of_samples(data, seed, 0)
    train_sizes = minibatch_sizes(ordered, plan.minibatch, dynamic, training=True, limit=limit) if trains else None
    test_sizes = None if test is None else minibatch_sizes(test, plan.minibatch, dynamic, training=False, limit=limit)
    frozen = [frozen_checksums(model_parameters(program)) if trains else {} for program in programs]
    transports = _transports(plan, rank, device, groups)
    reads = numbers[-1] == len(plan.pipeline) - 1 or any(program.model_inputs for program in programs)
    used = [("training", data.train, train_sizes), ("test", test, test_sizes)]
    marks, read = _data_marks(data, [(*one, sizes) for *one, sizes in used if sizes is not None], seed, rank, reads)
    if ordered is not data.train:
        marks["the order of the training samples"] = digest(ordered)
    built: list[WorkerStage] = []
    for (stage, replica), program, own_transport, own_frozen in zip(places, programs, transports, frozen, strict=True):
        place = StageContext(plan, stage, replica, rank, device, program, job, seed)
        recorder = _recorder(place, run / "metrics" / f"{recorded_name(plan, rank, stage)}.jsonl")
        fingerprint = replace(_fingerprint(place, trains), data=marks, read=read)
        training = engines.training(place, own_transport, recorder) if trains else None
        evaluated = _recorder(place, None) if trains else recorder
        built.append(
            WorkerStage(
                place=place,
                data=data,
                training=training,
                forward=engines.forward(place, own_transport, evaluated, training),
                train_sizes=train_sizes,
                test_sizes=test_sizes,
                graph_hash=graph_hash,
                fingerprint=fingerprint,
                frozen=own_frozen,
            )
        )
    return replace(built[-1], earlier=tuple(built[:-1]))


def _transports(plan: LaunchPlan, rank: int, device: torch.device, groups: Groups) -> Sequence[AnyTransport]:
    """The transport of each stage of a worker."""
    numbers, stages = [stage for stage, _ in plan.places(rank)], len(plan.pipeline)
    if groups.edges is not None:
        return [OrderedTransport(numbers[0], rank, device, groups.edges, lambda: wait_for(groups.active))]
    if plan.schedule.virtual is None:
        return [Transport(numbers[0], rank, device, gradients=groups.gradients)]
    mailbox: Mailbox = {}
    return [
        Transport(stage, rank, device, stages=stages, gradients=groups.gradients, mailbox=mailbox) for stage in numbers
    ]


def _data_marks(
    data: Data, used: Sequence[tuple[str, Any, MinibatchSizes]], seed: int, rank: int, reads: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """(digests of samples, digests of minibatches) of the data sets in use, given by name. The second is empty unless
    the worker `reads` minibatches. Raises `LaunchError` for data that differs between readings.
    """
    marks: dict[str, str] = {}
    read: dict[str, str] = {}
    with user_code_errors("reading the job's data"):
        check_order(data, seed)
        for name, dataset, sizes in used:
            marks |= data_fingerprint(name, dataset, seed, rank)
            if reads:
                read |= minibatch_fingerprint(name, dataset, sizes, data, seed)
    return marks, read


def model_parameters(program: Program) -> dict[str, Tensor]:
    """The parameters of a stage, under their names in a checkpoint."""
    return {MODEL_PREFIX + name: one for name, one in program.parameters_by_name().items()}


def _fingerprint(place: StageContext, trains: bool) -> Fingerprint:
    """Digests of the job's file, and of the stage's weights if it has replicas or shares them."""
    state = {**place.program.parameters_by_name(), **place.program.buffers_by_name()}
    weights = digest(state) if place.replicas > 1 else ""
    shared = place.program.shared if trains else {}
    digests = {name: (digest({name: state[name]}), stages) for name, stages in shared.items()}
    job = job_file(place.plan.model_ref)
    return Fingerprint(place.rank, place.stage, weights=weights, job="" if job is None else job.digest, shared=digests)


def _recorder(place: StageContext, path: Path | None) -> Recorder:
    deepest = max(shape.replicas * shape.depth for shape in place.plan.shapes)
    group = place.plan.accumulate or 1
    # The steady state starts after a whole group, so that every update counts together with all its minibatches.
    skip = -(-(deepest + 1) // group) * group - 1
    return Recorder(path, place.rank, place.stage, place.replica, place.replicas, skip=skip)
