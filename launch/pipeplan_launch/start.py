"""The start of a run: rank 0 decides on the run folder and the checkpoint, then every worker builds its stage."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from pipeplan_launch import checkpoint, restarts, runfolder, saving, setup
from pipeplan_launch.arguments import check_start_options
from pipeplan_launch.config import LaunchPlan
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.gathering import Attempt
from pipeplan_launch.manifest import Manifest
from pipeplan_launch.optimizers import optimizer_state
from pipeplan_launch.processes import Groups
from pipeplan_launch.setup import Options, Stage
from pipeplan_launch.summary import covers

DEFAULT_EPOCHS = 10


@dataclass(frozen=True)
class Start:
    """The decision of rank 0, which all workers follow."""

    run: Path
    """The run folder."""
    seed: int
    checkpoint: Path | None = None
    """The checkpoint from which to go on; None for a new run."""
    finished: int | None = None
    """Number of epochs of the run to resume, if there is nothing left to do; else None."""

    @property
    def goes_on_elsewhere(self) -> bool:
        """Whether the checkpoint belongs to another run."""
        return self.checkpoint is not None and self.checkpoint.parent.parent != self.run


def decide(options: Options, plan: LaunchPlan, attempt: Attempt | None = None) -> Start:
    """Decide how to start the run; called at rank 0.

    Raises `LaunchError`. No folder is made before all checks that do not need the model have passed.
    """
    check_start_options(options.resume, options.resume_from, options.weights, trains=plan.mode == "training")
    # The store comes first, as rank 0 may be on another server after a restart. The launcher's folder is the fallback,
    # as torchrun may use a new store for each attempt.
    before = (attempt.run_before() if attempt is not None else None) or restarts.run_of_last_attempt()
    if before is not None:
        start = _restart(before, options, plan)
    elif options.resume:
        run = runfolder.run_to_resume(options.plan_folder, options.run_dir)
        runfolder.hold(run, patience_s=0.0)
        start = _go_on(run, checkpoint.at(run), options, plan)
    elif options.resume_from is not None:
        manifest = checkpoint.at(options.resume_from)
        _check_fits(manifest, options, plan)
        if manifest.finished >= epochs_of(options):
            start = Start(options.resume_from, manifest.seed, finished=manifest.finished)
        else:
            start = Start(_new_run(options), manifest.seed, manifest.folder)
    else:
        if options.weights is not None:
            checkpoint.at(options.weights)
        start = Start(_new_run(options), options.seed or 0)
    if start.finished is None:
        restarts.remember_run(start.run)
        if attempt is not None:
            attempt.remember_run(start.run)
    return start


def build(options: Options, plan: LaunchPlan, groups: Groups, start: Start) -> tuple[Stage, Manifest | None] | None:
    """(this worker's stage, the checkpoint from which it goes on); None for an idle worker. Raises `LaunchError`."""
    rank = dist.get_rank()
    if plan.place(rank) is None:
        return None
    stage = setup.build(options, plan, rank, groups.replicas, start.seed, start.run, groups.flush)
    if stage.training is not None:
        # An optimiser that cannot be saved is reported now, not at the first checkpoint. The modules for saving are
        # imported now, so that their memory is not counted as memory of training.
        optimizer_state(stage.training.optimizer, stage.training.trained)
        importlib.import_module("pipeplan_launch.storage")
    if start.checkpoint is not None:
        return stage, saving.restore(stage, start.checkpoint)
    if options.weights is not None:
        saving.load_weights(checkpoint.at(options.weights), stage.place.program)
    return stage, None


def epochs_of(options: Options) -> int:
    """Total number of epochs to train."""
    return options.epochs or DEFAULT_EPOCHS


def _new_run(options: Options) -> Path:
    run = runfolder.new_run(options.plan_folder, options.run_dir)
    runfolder.hold(run, patience_s=0.0)
    return run


def _go_on(run: Path, manifest: Manifest, options: Options, plan: LaunchPlan) -> Start:
    """Continue a run in its own folder."""
    _check_fits(manifest, options, plan)
    if manifest.finished >= epochs_of(options) and covers(run, manifest.finished):
        return Start(run, manifest.seed, finished=manifest.finished)
    runfolder.reopen(run, manifest.position.epoch, manifest.position.minibatch)
    return Start(run, manifest.seed, manifest.folder)


def _restart(run: Path, options: Options, plan: LaunchPlan) -> Start:
    """Start after a restart: from the run's last checkpoint, or as the first attempt did if there is none."""
    runfolder.hold(run)
    manifest = checkpoint.latest(run)
    if manifest is not None:
        return _go_on(run, manifest, options, plan)
    if options.resume_from is None:
        runfolder.reopen(run, 0, 0)
        return Start(run, options.seed or 0)
    manifest = checkpoint.at(options.resume_from)
    _check_fits(manifest, options, plan)
    runfolder.reopen(run, manifest.position.epoch, manifest.position.minibatch)
    return Start(run, manifest.seed, manifest.folder)


def _check_fits(manifest: Manifest, options: Options, plan: LaunchPlan) -> None:
    if options.seed not in (None, manifest.seed):
        raise LaunchError(
            f"{manifest.folder} was begun with --seed {manifest.seed}: resume with that or leave --seed out"
        )
    if plan.graph_hash is not None:
        checkpoint.check_fits(manifest, plan.model_ref, plan.graph_hash)
