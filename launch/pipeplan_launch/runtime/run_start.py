"""The start of a run: rank 0 decides on the run folder and the checkpoint, then every worker builds its stage."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from pipeplan_launch.checkpoint import checkpoint
from pipeplan_launch.checkpoint.manifest import Manifest
from pipeplan_launch.checkpoint.optimizer_state import optimizer_state
from pipeplan_launch.command_line import check_start_options
from pipeplan_launch.elastic import restart_state
from pipeplan_launch.elastic.process_groups import Groups
from pipeplan_launch.elastic.rendezvous import Attempt
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.runtime import stage_checkpoint, stage_setup
from pipeplan_launch.runtime.stage_setup import RunOptions, WorkerStage
from pipeplan_launch.telemetry import run_folder
from pipeplan_launch.telemetry.summary import covers_epochs

DEFAULT_EPOCHS = 10


@dataclass(frozen=True)
class RunStart:
    """The decision of rank 0, which all workers follow."""

    run: Path
    """The run folder."""
    seed: int
    checkpoint: Path | None = None
    """The checkpoint from which to continue; None for a new run."""
    finished: int | None = None
    """Number of epochs of the run to resume, if there is nothing left to do; else None."""

    @property
    def continues_other_run(self) -> bool:
        """Whether the checkpoint belongs to another run."""
        return self.checkpoint is not None and self.checkpoint.parent.parent != self.run


def decide_start(options: RunOptions, plan: LaunchPlan, attempt: Attempt | None = None) -> RunStart:
    """Decide how to start the run; called at rank 0.

    Raises `LaunchError`. No folder is made before all checks that do not need the model have passed.
    """
    check_start_options(options.resume, options.resume_from, options.weights, trains=plan.mode == "training")
    # The store comes first, as rank 0 may be on another server after a restart. The launcher's folder is the fallback,
    # as torchrun may use a new store for each attempt.
    previous_run = (attempt.previous_run() if attempt is not None else None) or restart_state.run_of_last_attempt()
    if previous_run is not None:
        start = _restart(previous_run, options, plan)
    elif options.resume:
        run = run_folder.run_to_resume(options.plan_folder, options.run_dir)
        run_folder.lock_run(run, patience_s=0.0)
        start = _continue_run(run, checkpoint.find_checkpoint(run), options, plan)
    elif options.resume_from is not None:
        manifest = checkpoint.find_checkpoint(options.resume_from)
        _check_fits(manifest, options, plan)
        if manifest.finished >= epoch_count(options):
            start = RunStart(options.resume_from, manifest.seed, finished=manifest.finished)
        else:
            start = RunStart(_new_run(options), manifest.seed, manifest.folder)
    else:
        if options.weights is not None:
            checkpoint.find_checkpoint(options.weights)
        start = RunStart(_new_run(options), options.seed or 0)
    if start.finished is None:
        restart_state.remember_run(start.run)
        if attempt is not None:
            attempt.remember_run(start.run)
    return start


def build_own_stage(
    options: RunOptions, plan: LaunchPlan, groups: Groups, start: RunStart
) -> tuple[WorkerStage, Manifest | None] | None:
    """(this worker's stage, the checkpoint it was restored from); None for an idle worker. Raises `LaunchError`."""
    rank = dist.get_rank()
    if plan.place(rank) is None:
        return None
    stage = stage_setup.build_stage(options, plan, rank, groups.replicas, start.seed, start.run, groups.flush)
    if stage.training is not None:
        # An optimiser that cannot be saved is reported now, not at the first checkpoint. The modules for saving are
        # imported now, so that their memory is not counted as memory of training.
        optimizer_state(stage.training.optimizer, stage.training.trained)
        importlib.import_module("pipeplan_launch.checkpoint.tensor_store")
    if start.checkpoint is not None:
        return stage, stage_checkpoint.restore_stage(stage, start.checkpoint)
    if options.weights is not None:
        stage_checkpoint.load_weights(checkpoint.find_checkpoint(options.weights), stage.place.program)
    return stage, None


def epoch_count(options: RunOptions) -> int:
    """Total number of epochs to train."""
    return options.epochs or DEFAULT_EPOCHS


def _new_run(options: RunOptions) -> Path:
    run = run_folder.new_run(options.plan_folder, options.run_dir)
    run_folder.lock_run(run, patience_s=0.0)
    return run


def _continue_run(run: Path, manifest: Manifest, options: RunOptions, plan: LaunchPlan) -> RunStart:
    """Continue a run in its own folder."""
    _check_fits(manifest, options, plan)
    if manifest.finished >= epoch_count(options) and covers_epochs(run, manifest.finished):
        return RunStart(run, manifest.seed, finished=manifest.finished)
    run_folder.reopen_run(run, manifest.position.epoch, manifest.position.minibatch)
    return RunStart(run, manifest.seed, manifest.folder)


def _restart(run: Path, options: RunOptions, plan: LaunchPlan) -> RunStart:
    """Start after a restart: from the run's last checkpoint, or as the first attempt did if there is none."""
    run_folder.lock_run(run)
    manifest = checkpoint.latest_checkpoint(run)
    if manifest is not None:
        return _continue_run(run, manifest, options, plan)
    if options.resume_from is None:
        run_folder.reopen_run(run, 0, 0)
        return RunStart(run, options.seed or 0)
    manifest = checkpoint.find_checkpoint(options.resume_from)
    _check_fits(manifest, options, plan)
    run_folder.reopen_run(run, manifest.position.epoch, manifest.position.minibatch)
    return RunStart(run, manifest.seed, manifest.folder)


def _check_fits(manifest: Manifest, options: RunOptions, plan: LaunchPlan) -> None:
    if options.seed not in (None, manifest.seed):
        raise LaunchError(
            f"the run of {manifest.folder} has --seed {manifest.seed}: resume with the same or leave --seed out"
        )
    if plan.graph_hash is not None:
        checkpoint.check_same_model(manifest, plan.model_ref, plan.graph_hash)
