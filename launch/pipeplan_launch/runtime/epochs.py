"""Training epoch by epoch: segments between checkpoints, evaluation, and the reaction to a stop request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import isfinite, lcm
from pathlib import Path
from typing import Any

from pipeplan_launch.checkpoint.manifest import History, Manifest, Position
from pipeplan_launch.comm import gradient_exchange
from pipeplan_launch.elastic import process_groups
from pipeplan_launch.elastic.graceful_stop import GracefulStop, HangWatch
from pipeplan_launch.elastic.process_groups import Groups, run_in_all
from pipeplan_launch.elastic.restart_state import record_stop_line
from pipeplan_launch.errors import LaunchError, print_status
from pipeplan_launch.job.callbacks import CallbackList, EpochResult, MinibatchInfo, RunInfo
from pipeplan_launch.plan.run_options import staleness_text
from pipeplan_launch.runtime import stage_checkpoint, stage_optimizer
from pipeplan_launch.runtime.action_stream import run_stages
from pipeplan_launch.runtime.data import Batches, MinibatchSizes
from pipeplan_launch.runtime.engine import Engine, Segment
from pipeplan_launch.runtime.inference import Score
from pipeplan_launch.runtime.run_start import RunStart, epoch_count
from pipeplan_launch.runtime.stage_setup import RunOptions, WorkerStage
from pipeplan_launch.telemetry.progress import LearningWatch, Progress
from pipeplan_launch.telemetry.recorder import MinibatchRecord


class EpochLoop:
    """Training on an active worker. All workers go through the same segments, checkpoints and evaluations."""

    def __init__(
        self,
        options: RunOptions,
        groups: Groups,
        stage: WorkerStage,
        start: RunStart,
        resumed: Manifest | None,
        stopping: GracefulStop,
    ) -> None:
        """`resumed`: the checkpoint that the stage was restored from. Raises `LaunchError` if training cannot resume
        from it.
        """
        assert stage.training is not None
        assert stage.train_sizes is not None
        self._options, self._groups, self._stage, self._start = options, groups, stage, start
        self._training, self._sizes, self._stopping = stage.training, stage.train_sizes, stopping
        self._trained = [one.training for one in stage.every if one.training is not None]
        """The engines of all stages of the worker; `_training` is the last one."""
        self._epochs = epoch_count(options)
        place = stage.place
        self._is_leader = place.rank == place.plan.active[0]
        self._reports = place.is_last and place.replica == 0
        self._saved: tuple[Position, Path] | None = None
        """Position and folder of this run's last checkpoint."""
        self._step_time: float | None = None
        staleness = staleness_text(place.plan)
        self._watch: LearningWatch | None = None
        """Detects that training with stale gradients does not learn; None in a run that is resumed."""
        if resumed is None and staleness is not None:
            group = place.plan.schedule.group_size(place.plan.shapes[-1])
            self._watch = LearningWatch(group, staleness, print_status)
        self.results: list[EpochResult] = []
        """Results of the epochs that this process has finished."""
        self.stopped: Position | None = None
        """Position at which a stop request ended the run."""
        self._position, self._history = Position(0, 0, self._sizes.count), History()
        if resumed is not None:
            self._position, self._history = position_in(resumed, self._sizes), resumed.history
            self._saved = None if start.continues_other_run else (self._position, resumed.folder)
        self._hang_watch = HangWatch(options.timeout_s, process_groups.end_as_hung)
        self._set_rates()
        self._listeners = CallbackList(place.job.callbacks if self._reports else ())
        if self._reports:
            self._print_start(resumed)

    def run(self) -> dict[str, Any]:
        """Train until all epochs are done or a stop is requested. Returns training's part of summary.json."""
        progress = Progress(
            self._training.recorder,
            self._options.log_every,
            self._epochs,
            self._sizes.count,
            warns=not self._options.stop_on_nan,
        )
        if self._stage.place.is_last:
            self._training.on_minibatch = lambda step: self._after_minibatch(step, progress)
        if self._reports:
            plan, position = self._stage.place.plan, self._position
            self._listeners.start(
                RunInfo(
                    folder=self._start.run,
                    plan=plan.written(),
                    minibatch=plan.minibatch,
                    epochs=self._epochs,
                    minibatches=self._sizes.count,
                    epoch=position.epoch,
                    minibatch_of_epoch=position.minibatch,
                )
            )
        if self._start.continues_other_run:
            self._save()  # from now on this run does not depend on the other run's folder
        while self._position.epoch < self._epochs:
            if self._train_epoch() or self._finish_epoch(progress):
                self._save()
                self.stopped = self._position
                if self._is_leader:
                    record_stop_line(f"stopped after {self._position}: --resume goes on from there")
                break
            self._position = Position(self._position.epoch + 1, 0, self._sizes.count)
        stopped = self.stopped
        return {
            "epochs": self._history.results,
            "stopped": None if stopped is None else {"epoch": stopped.epoch, "minibatch": stopped.minibatch},
        }

    def _train_epoch(self) -> bool:
        """Train the rest of the epoch, with checkpoints at the requested interval. Returns whether to stop before its
        end.
        """
        batches = Batches(self._stage.data.train, self._sizes, self._start.seed, self._position.epoch, self._stage.data)
        met_s = process_groups.synchronise_workers(self._groups.active)
        for training in self._trained:
            training.begin_timeline(self._position.epoch, self._position.minibatch, self._sizes.count, met_s)
        while not self._position.epoch_trained:
            end = segment_end(self._position.minibatch, self._sizes.count, self._options.checkpoint_minibatches)
            segment = Segment(self._position.epoch, batches, self._position.minibatch, end)
            ran, stop = self._run(self._trained, segment)
            self._step_time = self._training.recorder.step_time_s()
            steps = [training.recorder.end_epoch(segment.first) for training in self._trained][-1]
            losses = [(step.loss * step.weight, step.weight) for step in steps if step.loss is not None]
            self._stop_unless_finite(steps)
            sums = [sum(loss for loss, _ in losses), sum(weight for _, weight in losses)]
            total, weight = process_groups.sum_over(sums, self._groups.active)
            self._history.add(total, weight)
            self._position = replace(self._position, minibatch=segment.first + ran)
            if stop or self._position.epoch_trained:
                for training in self._trained:
                    training.timeline.write(self._start.run)
            if stop:
                return True
            if not self._position.epoch_trained:
                self._save()
        return False

    def _finish_epoch(self, progress: Progress) -> bool:
        """Write a checkpoint and evaluate. Returns whether to stop here."""
        number, last = self._position.epoch + 1, self._position.epoch + 1 == self._epochs
        if last or number % self._options.checkpoint_every == 0:
            self._save()
        score: Score | None = Score.empty(self._stage.place.job)
        stop = False
        if last or number % self._options.evaluate_every == 0:
            score, stop = self._evaluate()
        if score is None:
            return True
        result = self._result(score)
        self.results.append(result)
        self._history = History([*self._history.results, result.as_json()])
        if self._saved is not None and self._saved[0] == self._position:
            self._on_leader(partial(stage_checkpoint.add_evaluation, self._saved[1], self._history))
        for training in self._trained:
            if training.rates is not None:
                training.rates.after_epoch(result.test_loss)
        if self._reports:
            print_status(result.line(self._epochs, self._step_time))
            if result.loss is not None:
                progress.warn_unless_finite(result.loss, self._position.epoch, None)
            self._listeners.epoch(result)
        return stop and not last

    def _evaluate(self) -> tuple[Score | None, bool]:
        """(this worker's score, whether to stop now). The score is None if the stop came before the end of the test
        data.
        """
        stage = self._stage
        if stage.test_sizes is None:
            return Score.empty(stage.place.job), False
        data: Any = stage.data.test if stage.data.test is not None else stage.data.train
        batches = Batches(data, stage.test_sizes, self._start.seed, self._position.epoch, stage.data)
        segment = Segment(self._position.epoch, batches)
        ran, stop = self._run([one.forward for one in stage.every], segment)
        return (stage.forward.score if ran == segment.count else None), stop

    def _result(self, score: Score) -> EpochResult:
        """The epoch's result over all workers."""
        total = score.from_sum(process_groups.sum_over(score.as_list(), self._groups.active))
        has_loss = self._stage.place.job.loss is not None and total.loss_weight
        return EpochResult(
            epoch=self._position.epoch + 1,
            loss=self._history.loss,
            test_correct=total.correct,
            test_judged=total.judged,
            test_loss=total.loss_sum / total.loss_weight if has_loss else None,
            test_metrics=total.metrics,
        )

    def _run(self, engines: Sequence[Engine], segment: Segment) -> tuple[int, bool]:
        """(minibatches run, whether to stop now). Stop requests take effect only here. `engines`: one for each
        stage.
        """
        self._stopping.begin()
        for engine in engines:
            engine.limit = self._stopping.limit
            engine.on_progress = self._hang_watch.progress
        self._hang_watch.progress()
        run_stages(engines, segment)
        self._hang_watch.rest()
        stop = self._stopping.end()
        return self._stopping.reached(segment.count), stop

    def _save(self) -> None:
        """Write a checkpoint of the current position, unless there is one already."""
        if self._saved is None or self._saved[0] != self._position:
            folder = stage_checkpoint.save_checkpoint(
                self._stage, self._groups, self._start.run, self._position, self._history
            )
            self._saved = self._position, folder
            self._listeners.checkpoint(folder)

    def _on_leader(self, call: Callable[[], None]) -> None:
        """Make a call in the leading worker. All workers end if it raises `LaunchError`."""
        run_in_all(self._groups.active, lambda: call() if self._is_leader else None)

    def _set_rates(self) -> None:
        """Set the learning rates for the position where training starts. Raises `LaunchError` for a scheduler that
        cannot run.
        """
        for training in self._trained:
            rates = training.rates
            if rates is None:
                continue
            if rates.needs_test_loss and self._stage.test_sizes is None:
                raise LaunchError("ReduceLROnPlateau follows the test loss: give the job's data a test set")
            minibatches = self._position.epoch * self._sizes.count + self._position.minibatch
            rates.catch_up(minibatches, [result.get("test_loss") for result in self._history.results])

    def _after_minibatch(self, step: MinibatchRecord, progress: Progress) -> None:
        """React to a minibatch that this replica of the last stage has finished."""
        if self._options.stop_on_nan and step.loss is not None and not isfinite(step.loss):
            self._stopping.request()  # all workers stop soon, at the same minibatch
        if self._reports:
            self._report_minibatch(step, progress)

    def _stop_unless_finite(self, steps: Sequence[MinibatchRecord]) -> None:
        """After a segment, raise `LaunchError` if one of its losses was not finite, unless the options let training go
        on.

        The weights after such a segment are never saved.
        """
        if not self._options.stop_on_nan:
            return
        bad = [step.minibatch for step in steps if step.loss is not None and not isfinite(step.loss)]
        first = process_groups.lowest_of(min(bad, default=None), self._groups.active)
        if first is not None:
            self._on_leader(partial(self._end_because_of, first))

    def _end_because_of(self, minibatch: int) -> None:
        where = f"epoch {self._position.epoch + 1}/{self._epochs}, minibatch {minibatch + 1}/{self._sizes.count}"
        saved = "there is no checkpoint yet" if self._saved is None else f"the last checkpoint is {self._saved[1]}"
        raise LaunchError(
            f"the loss became non-finite in {where}, and training has stopped there ({saved}): a lower learning rate "
            "is the usual cure; --on-nan warn trains on"
        )

    def _report_minibatch(self, step: MinibatchRecord, progress: Progress) -> None:
        """Report a minibatch that the last stage has finished: on stderr, and to the job's callbacks."""
        progress(step)
        if self._watch is not None and step.loss is not None and isfinite(step.loss) and step.weight:
            self._watch(self._stage.place.replicas, step.loss)
        if not self._listeners:
            return
        assert step.loss is not None
        rates, step_time_s = self._training.rates, self._training.recorder.step_time_s()
        self._listeners.minibatch(
            MinibatchInfo(
                epoch=step.epoch,
                minibatch=step.minibatch,
                samples=step.samples,
                loss=step.loss,
                learning_rate=None if rates is None else rates.current,
                minibatches_per_s=1 / step_time_s if step_time_s else None,
            )
        )

    def _print_notes(self) -> None:
        """Print notes about options whose effect with this plan may surprise the user."""
        place = self._stage.place
        for note in (
            stage_optimizer.clipping_note(place),
            stage_optimizer.correction_note(place, self._options.staleness, self._training.optimizer),
            gradient_exchange.note_on_unused_option(self._options.averaging, place.plan),
        ):
            if note is not None:
                print_status(f"note: {note}")
        # In `group` minibatches every stage makes a whole number of updates.
        group = lcm(*(place.plan.schedule.group_size(shape) for shape in place.plan.shapes))
        every = self._options.checkpoint_minibatches
        if every is not None and every % group:
            print_status(
                f"note: --checkpoint-minibatches {every} is no multiple of {group}, so updates before a checkpoint "
                "average fewer minibatches"
            )

    def _print_start(self, resumed: Manifest | None) -> None:
        """Print the notes, and where training resumes."""
        restart_prefix = self._groups.attempt.restart_prefix()
        if not restart_prefix:  # the first attempt has printed them
            self._print_notes()
        if resumed is None:
            if restart_prefix:
                print_status(f"{restart_prefix}training begins anew, as there is no checkpoint yet")
            return
        print_status(f"{restart_prefix}resumed from {resumed.folder}, after {resumed.position}")
        done = resumed.position.minibatch * resumed.minibatch_samples
        repeated = done - self._position.minibatch * self._sizes.minibatch
        if not resumed.position.epoch_trained and repeated:
            print_status(
                f"note: with minibatches of {self._sizes.minibatch}, {repeated} samples of this epoch are run again"
            )


def segment_end(first: int, count: int, every: int | None) -> int:
    """The end of the segment that starts with minibatch `first`: the next multiple of `every`, or the end of the
    epoch.
    """
    return count if every is None else min(count, (first // every + 1) * every)


def position_in(manifest: Manifest, sizes: MinibatchSizes) -> Position:
    """The position of a checkpoint, counted in minibatches of these sizes. Raises `LaunchError` for other training
    data.

    The order of the samples does not depend on the minibatch size, so the number of samples determines the position.
    """
    position = manifest.position
    if position.epoch_trained:
        if manifest.finished > position.epoch:  # it is evaluated, too
            return Position(position.epoch + 1, 0, sizes.count)
        return Position(position.epoch, sizes.count, sizes.count)
    if manifest.samples != sizes.samples:
        raise LaunchError(
            f"{manifest.folder} is in the middle of an epoch over {manifest.samples} samples, and the job's training "
            f"data has {sizes.samples}: resume with the same training data"
        )
    done = position.minibatch * manifest.minibatch_samples // sizes.minibatch
    return Position(position.epoch, min(done, sizes.count), sizes.count)
