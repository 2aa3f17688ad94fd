"""One worker from start to end: join, build, run epochs, checkpoint, report."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from pipeplan_launch import agreement, checkpoint, processes, runfolder, saving, setup
from pipeplan_launch.allocator import keep_freed_memory
from pipeplan_launch.batches import Batches
from pipeplan_launch.config import LaunchPlan, load_plan
from pipeplan_launch.engine import Segment
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import write_json
from pipeplan_launch.inference import Score
from pipeplan_launch.interrupt import Interrupted, check_interrupt
from pipeplan_launch.loading import describe
from pipeplan_launch.memory import peak_resident_bytes, reset_peak, resident_bytes
from pipeplan_launch.metrics import Recorder, Step
from pipeplan_launch.optimizers import optimizer_state
from pipeplan_launch.processes import Groups
from pipeplan_launch.progress import EpochResult, Progress, accuracy_text, say
from pipeplan_launch.setup import Options, Stage
from pipeplan_launch.summary import WorkerReport, epochs_before, summarise, table

DEFAULT_EPOCHS = 10
T = TypeVar("T")


class FailedElsewhere(Exception):
    """Another worker has reported an error: this one ends without a word."""


class Unexpected(Exception):
    """An error that is nobody's in particular, in one line."""


@dataclass(frozen=True)
class Start:
    """What rank 0 decides for everyone."""

    run: Path
    seed: int
    resumed: bool
    finished: int | None = None
    """Epochs that the run to resume has, where it needs no more: nothing is to do."""


def run(options: Options) -> None:
    """Be one worker of the plan in `options`. Raises `LaunchError`, `FailedElsewhere` or `Interrupted`."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    plan = load_plan(options.plan_folder)
    keep_freed_memory()
    groups = processes.join(plan, options.timeout_s)
    rank = dist.get_rank()
    start = _together(groups, lambda: _decide(options, plan) if rank == 0 else None)
    start = processes.share(start, 0, groups.everyone)
    if start.finished is not None:
        if rank == 0:
            say(f"nothing left to do: {start.run} has {start.finished} epochs; give --epochs more than that to go on")
        processes.wait_for(groups.everyone)
        dist.destroy_process_group()
        return
    try:
        stage = _together(groups, lambda: _build(options, plan, groups, start))
        fingerprints = processes.exchange(None if stage is None else stage.fingerprint, groups.everyone)
        _together(groups, lambda: agreement.check([one for one in fingerprints if one is not None]))
        if stage is not None:
            Runner(options, plan, groups, stage, start).run()
        processes.wait_for(groups.everyone)
    except LaunchError as error:
        check_interrupt()  # then a peer that is gone was asked to stop too
        if runfolder.claim_error(start.run, str(error)):
            raise
        raise FailedElsewhere from error
    except Interrupted as signal:
        if runfolder.has_failed(start.run):
            raise FailedElsewhere from signal
        raise
    except FailedElsewhere:
        raise
    except Exception as error:
        raise _unexpected(start.run, plan, error) from error
    dist.destroy_process_group()


def _unexpected(run: Path, plan: LaunchPlan, error: Exception) -> Exception:
    """What nobody foresaw: one line, and the traceback in the run folder."""
    rank = dist.get_rank()
    place = plan.place(rank)
    where = f"rank {rank}, {'idle' if place is None else f'stage {place[0]}'}"
    path = runfolder.save_traceback(run, rank, "".join(traceback.format_exception(error)))
    message = f"something failed unexpectedly ({where}): {describe(error)}"
    if not runfolder.claim_error(run, message):
        return FailedElsewhere()
    return Unexpected(message + (f"; the traceback is in {path}" if path else ""))


def _together(groups: Groups, call: Callable[[], T]) -> T:
    """Do something in every worker; if it fails in any, all of them end, and one says why."""
    error, result = None, None
    try:
        result = call()
    except LaunchError as caught:
        error = caught
    lowest = processes.first_failure(error is not None, groups.everyone)
    if lowest is not None:
        if error is not None and lowest == dist.get_rank():
            raise error
        raise FailedElsewhere
    return result  # type: ignore[return-value]


def _decide(options: Options, plan: LaunchPlan) -> Start:
    if not options.resume:
        run = runfolder.new_run(options.plan_folder, options.run_dir)
        return Start(run, options.seed or 0, resumed=False)
    run = runfolder.run_to_resume(options.plan_folder, options.run_dir)
    manifest = checkpoint.latest(run)
    if manifest is None:
        raise LaunchError(f"{run} has no complete checkpoint to resume from")
    if options.seed not in (None, manifest.seed):
        raise LaunchError(f"{run} was begun with --seed {manifest.seed}: resume with that or leave --seed out")
    done = plan.mode == "training" and manifest.epoch >= (options.epochs or DEFAULT_EPOCHS)
    if not done:
        runfolder.reopen(run)
    return Start(run, manifest.seed, resumed=True, finished=manifest.epoch if done else None)


def _build(options: Options, plan: LaunchPlan, groups: Groups, start: Start) -> Stage | None:
    rank = dist.get_rank()
    if plan.place(rank) is None:
        return None
    stage = setup.build(options, plan, rank, groups.replicas, start.seed, start.run)
    if stage.training is not None:  # an optimiser that cannot be saved is said now, not at the end of the epoch
        optimizer_state(stage.training.optimizer, stage.training.trained)
    return stage


class Runner:
    """An active worker at work."""

    def __init__(self, options: Options, plan: LaunchPlan, groups: Groups, stage: Stage, start: Start) -> None:
        self._options = options
        self._plan = plan
        self._groups = groups
        self._stage = stage
        self._start = start
        self._leader = plan.active[0]
        place = stage.place
        self._leads = place.rank == self._leader
        self._speaks = place.is_last and place.replica == 0
        self._results: list[EpochResult] = []
        state = [*place.program.parameters_by_name().values(), *place.program.buffers_by_name().values()]
        reset_peak()
        self._before = resident_bytes() - sum(tensor.numel() * tensor.element_size() for tensor in state)

    def run(self) -> None:
        """Train or infer, then report."""
        if self._speaks:
            say(f"plan {self._plan.written()}, minibatch {self._plan.minibatch}, run folder {self._start.run}")
            for sizes in (self._stage.train_sizes, self._stage.test_sizes):
                if sizes is not None and sizes.note:
                    say(f"note: {sizes.note}")
        extra = self._train() if self._plan.mode == "training" else self._infer()
        self._recorder.close()
        self._report(extra)

    @property
    def _recorder(self) -> Recorder:
        return (self._stage.training or self._stage.forward).recorder

    def _train(self) -> dict[str, Any]:
        stage, epochs = self._stage, self._options.epochs or DEFAULT_EPOCHS
        training, sizes = stage.training, stage.train_sizes
        assert training is not None
        assert sizes is not None
        first = self._restore() if self._start.resumed else 0
        earlier = epochs_before(self._start.run, first)
        if self._speaks:
            progress = Progress(training.recorder, self._options.log_every, epochs, sizes.count)
            training.on_minibatch = progress
        for epoch in range(first, epochs):
            training.run(Segment(epoch, Batches(stage.data.train, sizes, self._start.seed, epoch)))
            pace = training.recorder.pace_s()
            steps = training.recorder.end_epoch()
            result = self._epoch_result(epoch, steps, self._evaluate(epoch))
            self._results.append(result)
            if self._speaks:
                say(result.line(epochs, pace))
                if result.loss is not None:
                    progress.warn_unless_finite(result.loss, epoch, None)
            if (epoch + 1) % self._options.checkpoint_every == 0 or epoch + 1 == epochs:
                self._checkpoint(epoch + 1)
        return {"epochs": [*earlier, *(result.as_json() for result in self._results)]}

    def _evaluate(self, epoch: int) -> Score:
        stage = self._stage
        if stage.test_sizes is None:
            return Score()
        data: Any = stage.data.test if stage.data.test is not None else stage.data.train
        stage.forward.run(Segment(epoch, Batches(data, stage.test_sizes, self._start.seed, epoch)))
        return stage.forward.score

    def _epoch_result(self, epoch: int, steps: list[Step], score: Score) -> EpochResult:
        losses = [step.loss for step in steps if step.loss is not None]
        sums = processes.sum_over([sum(losses), float(len(losses)), *score.as_list()], self._groups.active)
        loss_sum, minibatches, correct, samples, judged, test_loss = sums
        return EpochResult(
            epoch + 1,
            loss_sum / minibatches if minibatches else None,
            correct,
            judged,
            test_loss / samples if samples and self._stage.place.job.loss is not None else None,
        )

    def _infer(self) -> dict[str, Any]:
        passes = self._options.epochs or 1
        self._stage.forward.on_minibatch = None
        for number in range(passes):
            processes.wait_for(self._groups.active)
            begun = time.perf_counter()
            score = self._evaluate(number)
            total = Score(*processes.sum_over(score.as_list(), self._groups.active))
            taken = time.perf_counter() - begun
            self._recorder.end_epoch()
            if self._speaks:
                say(f"pass {number + 1}/{passes}  {accuracy_text(total.correct, total.judged)}")
        return {
            "accuracy": total.accuracy,
            "correct": total.correct,
            "samples": total.samples,
            "samples_per_s": total.samples / taken,
        }

    def _checkpoint(self, epoch: int) -> None:
        if self._stage.place.replica == 0:
            saving.save(self._stage, self._start.run, epoch)
        processes.wait_for(self._groups.active)
        if self._leads:
            checkpoint.write_manifest(self._start.run, epoch, self._start.seed, self._plan, self._stage.graph_hash)

    def _restore(self) -> int:
        """Load the latest checkpoint; returns the epochs that it has behind it."""
        manifest = saving.restore(self._stage, self._start.run)
        if self._speaks:
            say(f"resumed from {manifest.folder}, after epoch {manifest.epoch}")
        return manifest.epoch

    def _report(self, extra: dict[str, Any]) -> None:
        place = self._stage.place
        report = WorkerReport(place.rank, place.stage, place.replica, self._recorder.steady, self._peak())
        reports = processes.collect(report, self._leader, self._groups.active)
        if not self._leads:
            return
        summary = summarise(self._plan, reports) | {"seed": self._start.seed, "torch": torch.__version__} | extra
        write_json(self._start.run / "summary.json", summary)
        print(table(summary))
        if "samples_per_s" in extra:
            print(f"{accuracy_text(extra['correct'], extra['samples'])}, {extra['samples_per_s']:.1f} images/s")
        elif self._results and self._results[-1].test_judged:
            last = self._results[-1]
            print(f"test {accuracy_text(last.test_correct, last.test_judged)} after epoch {last.epoch}")
        print(f"run folder: {self._start.run}", flush=True)

    def _peak(self) -> int:
        device = self._stage.place.device
        if device.type == "cuda":
            return torch.cuda.max_memory_allocated(device)
        return max(0, peak_resident_bytes() - self._before)
