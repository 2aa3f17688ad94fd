"""The start of a run: rank 0 decides on the run folder and the checkpoint, then every worker builds its stage."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from pipeplan_launch.checkpoint import checkpoint
from pipeplan_launch.checkpoint.manifest import Manifest
from pipeplan_launch.checkpoint.optimizer_state import optimizer_state
from pipeplan_launch.command_line import check_start_options
from pipeplan_launch.elastic.process_groups import FailedElsewhere, Groups, broadcast, first_failure, run_in_all
from pipeplan_launch.elastic.rendezvous import Attempt
from pipeplan_launch.errors import DamagedCheckpoint, LaunchError, print_status
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.run_options import check_averaging_options, check_staleness_options
from pipeplan_launch.runtime import stage_checkpoint
from pipeplan_launch.runtime.stage_setup import Engines, RunOptions, WorkerStage, build_stage
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
    """Number of finished epochs of the run to resume, if nothing is left to do; else None."""

    @property
    def continues_other_run(self) -> bool:
        """Whether the checkpoint belongs to another run."""
        return self.checkpoint is not None and self.checkpoint.parent.parent != self.run


def decide_start(options: RunOptions, plan: LaunchPlan, attempt: Attempt | None = None) -> RunStart:
    """Decide how to start the run; called at rank 0.

    Raises `LaunchError`. No folder is made before all checks that do not need the model have passed.
    """
    check_start_options(options.resume, options.resume_from, options.weights, trains=plan.mode == "training")
    check_staleness_options(options.staleness, plan)
    check_averaging_options(options.averaging, plan, options.compile_backend)
    previous_run = None if attempt is None else attempt.previous_run()
    if previous_run is not None:
        start = _restart(previous_run, options, plan)
    elif options.resume:
        run = run_folder.run_to_resume(options.plan_folder, options.run_dir)
        run_folder.lock_run(run, patience_s=0.0)
        start = _continue_run(run, checkpoint.find_checkpoint(run, print_status), options, plan)
    elif options.resume_from is not None:
        manifest = checkpoint.find_checkpoint(options.resume_from, print_status)
        _check_fits(manifest, options, plan)
        if manifest.finished >= epoch_count(options):
            return RunStart(options.resume_from, manifest.seed, finished=manifest.finished)
        start = RunStart(_new_run(options), manifest.seed, manifest.folder)
    else:
        if options.weights is not None:
            checkpoint.find_checkpoint(options.weights, print_status)
        start = RunStart(_new_run(options), options.seed or 0)
    if start.finished is None and attempt is not None:
        attempt.remember_run(start.run)
    return start


def build_own_stage(
    options: RunOptions, plan: LaunchPlan, groups: Groups, start: RunStart, engines: Engines
) -> WorkerStage | None:
    """This worker's stage, before it is restored from a checkpoint; None for an idle worker. Raises `LaunchError`."""
    if plan.place(dist.get_rank()) is None:
        return None
    stage = build_stage(options, plan, groups, start.seed, start.run, engines)
    for one in stage.every:
        training = one.training
        if training is not None:  # an optimiser that cannot be saved is reported now, not at the first checkpoint
            optimizer_state(training.optimizer, training.updated)
        if start.checkpoint is None and options.weights is not None:
            division = None if training is None else training.divided
            source = checkpoint.find_checkpoint(options.weights)
            stage_checkpoint.load_weights(source, one.place.program, one.frozen, division)
    return stage


def restore_in_all(
    stage: WorkerStage | None, options: RunOptions, groups: Groups, start: RunStart
) -> tuple[RunStart, Manifest | None]:
    """(the start, the checkpoint that this worker's stage was restored from). Every worker of the run calls this.

    If a worker finds the checkpoint damaged, all workers go back to the checkpoint before it. The returned start names
    that checkpoint, and one line reports it. Raises `LaunchError`, or `FailedElsewhere` in all workers but one.
    """
    while start.checkpoint is not None:
        manifest, damage = run_in_all(groups.everyone, partial(_restored, stage, start.checkpoint))
        lowest = first_failure(damage is not None, groups.everyone)
        if lowest is None:
            return start, manifest
        rank = dist.get_rank()
        earlier = run_in_all(groups.everyone, partial(_start_before, start, options) if rank == 0 else lambda: None)
        earlier = broadcast(earlier, 0, groups.everyone, RunStart | None)
        if rank == lowest and damage is not None:
            if earlier is None:
                raise DamagedCheckpoint(f"{damage}; {checkpoint.NONE_LEFT}")
            print_status(f"{damage}; {checkpoint.GOES_BACK}")
        elif earlier is None:
            raise FailedElsewhere
        start = earlier
    return start, None


def _restored(stage: WorkerStage | None, folder: Path) -> tuple[Manifest | None, DamagedCheckpoint | None]:
    """(the checkpoint that this worker's stage was restored from, None), or (None, the damage that was found)."""
    try:
        return (None if stage is None else stage_checkpoint.restore_stages(stage, folder)), None
    except DamagedCheckpoint as damage:
        return None, damage


def _start_before(start: RunStart, options: RunOptions) -> RunStart | None:
    """The start from the last undamaged checkpoint before `start.checkpoint`; None if there is none, or if the user
    asked for exactly this checkpoint.
    """
    assert start.checkpoint is not None
    if options.resume_from is not None and options.resume_from.resolve() == start.checkpoint.resolve():
        return None
    manifest = checkpoint.checkpoint_before(start.checkpoint, print_status)
    if manifest is None:
        return None
    if not start.continues_other_run:
        run_folder.reopen_run(start.run, manifest.position.epoch, manifest.position.minibatch)
    return replace(start, checkpoint=manifest.folder)


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
    manifest = checkpoint.latest_checkpoint(run, print_status)
    if manifest is None and options.resume_from is not None:
        manifest = checkpoint.find_checkpoint(options.resume_from, print_status)
    if manifest is not None:
        return _continue_run(run, manifest, options, plan)
    run_folder.reopen_run(run, 0, 0)
    return RunStart(run, options.seed or 0)


def _check_fits(manifest: Manifest, options: RunOptions, plan: LaunchPlan) -> None:
    if options.seed not in (None, manifest.seed):
        raise LaunchError(
            f"the run of {manifest.folder} has --seed {manifest.seed}: resume with the same or leave --seed out"
        )
    if plan.graph_hash is not None:
        checkpoint.check_same_model(manifest, plan.model_ref, plan.graph_hash)
