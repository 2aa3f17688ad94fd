"""Training, epoch after epoch: segments between checkpoints, evaluation, and where a stop request ends it."""

from __future__ import annotations

from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import Any

from pipeplan_launch import clipping, exchanges, processes, saving
from pipeplan_launch.batches import Batches, Sizes
from pipeplan_launch.callbacks import RunInfo
from pipeplan_launch.config import LaunchPlan
from pipeplan_launch.engine import Engine, Segment
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.inference import Score
from pipeplan_launch.listeners import Listeners
from pipeplan_launch.manifest import History, Manifest, Position
from pipeplan_launch.metrics import Step
from pipeplan_launch.processes import Groups
from pipeplan_launch.progress import EpochResult, Progress, say
from pipeplan_launch.restarts import announce_stop
from pipeplan_launch.setup import Options, Stage
from pipeplan_launch.start import Start, epochs_of
from pipeplan_launch.stopping import Stopping
from pipeplan_launch.together import together


class EpochLoop:
    """An active worker's training. All of them go through the same segments, checkpoints and evaluations."""

    def __init__(
        self, options: Options, groups: Groups, stage: Stage, start: Start, resumed: Manifest | None, stopping: Stopping
    ) -> None:
        """`resumed`: the checkpoint that the stage was restored from. `LaunchError` if it cannot go on here."""
        assert stage.training is not None
        assert stage.train_sizes is not None
        self._options, self._groups, self._stage, self._start = options, groups, stage, start
        self._training, self._sizes, self._stopping = stage.training, stage.train_sizes, stopping
        self._epochs = epochs_of(options)
        place = stage.place
        self._leads = place.rank == place.plan.active[0]
        self._speaks = place.is_last and place.replica == 0
        self._saved: tuple[Position, Path] | None = None
        """This run's last checkpoint."""
        self._pace: float | None = None
        self.results: list[EpochResult] = []
        """Of the epochs that this process has finished."""
        self.stopped: Position | None = None
        """Where a stop request has ended the run."""
        self._at, self._history = Position(0, 0, self._sizes.count), History()
        if resumed is not None:
            self._at, self._history = position_in(resumed, self._sizes), resumed.history
            self._saved = None if start.goes_on_elsewhere else (self._at, resumed.folder)
        self._set_rates()
        self._listeners = Listeners(place.job.callbacks if self._speaks else ())
        if self._speaks:
            self._say_start(resumed)

    def run(self) -> dict[str, Any]:
        """Train until the epochs are done or a stop is asked for; returns what summary.json says of it."""
        progress = Progress(self._training.recorder, self._options.log_every, self._epochs, self._sizes.count)
        if self._speaks:
            self._training.on_minibatch = lambda step: self._tell(step, progress)
            self._listeners.start(self._run_info())
        if self._start.goes_on_elsewhere:
            self._save()  # from now on this run stands by itself
        while self._at.epoch < self._epochs:
            stop = self._train_epoch() or self._finish_epoch(progress)
            if stop:
                self._stop()
                break
            self._at = Position(self._at.epoch + 1, 0, self._sizes.count)
        at = self.stopped
        return {
            "epochs": self._history.results,
            "stopped": None if at is None else {"epoch": at.epoch, "minibatch": at.minibatch},
        }

    def _train_epoch(self) -> bool:
        """What is left of the epoch, with a checkpoint every so many minibatches. Whether to stop before its end."""
        batches = Batches(self._stage.data.train, self._sizes, self._start.seed, self._at.epoch, self._stage.data)
        met_s = processes.meet(self._groups.active)
        self._training.begin_timeline(self._at.epoch, self._at.minibatch, self._sizes.count, met_s)
        while not self._at.whole:
            end = segment_end(self._at.minibatch, self._sizes.count, self._options.checkpoint_minibatches)
            segment = Segment(self._at.epoch, batches, self._at.minibatch, end)
            ran, stop = self._run(self._training, segment)
            self._pace = self._training.recorder.pace_s()
            steps = self._training.recorder.end_epoch(segment.first)
            losses = [step.loss for step in steps if step.loss is not None]
            total, count = processes.sum_over([sum(losses), float(len(losses))], self._groups.active)
            self._history.loss_sum += total
            self._history.losses += int(count)
            self._at = replace(self._at, minibatch=segment.first + ran)
            if stop or self._at.whole:
                self._training.timeline.write(self._start.run)
            if stop:
                return True
            if not self._at.whole:
                self._save()
        return False

    def _finish_epoch(self, progress: Progress) -> bool:
        """Checkpoint and evaluate. Whether to stop here."""
        number, last = self._at.epoch + 1, self._at.epoch + 1 == self._epochs
        if last or number % self._options.checkpoint_every == 0:
            self._save()
        due = last or number % self._options.evaluate_every == 0
        score, stop = self._evaluate() if due else (self._no_score(), False)
        if score is None:
            return True
        result = self._result(score)
        self.results.append(result)
        self._history = History([*self._history.results, result.as_json()])
        self._save_result()
        if self._training.rates is not None:
            self._training.rates.after_epoch(result.test_loss)
        if self._speaks:
            say(result.line(self._epochs, self._pace))
            if result.loss is not None:
                progress.warn_unless_finite(result.loss, self._at.epoch, None)
            self._listeners.epoch(result)
        return stop and not last

    def _evaluate(self) -> tuple[Score | None, bool]:
        """(what this worker counted, whether to stop now); no score where that came before the end."""
        stage = self._stage
        if stage.test_sizes is None:
            return self._no_score(), False
        data: Any = stage.data.test if stage.data.test is not None else stage.data.train
        batches = Batches(data, stage.test_sizes, self._start.seed, self._at.epoch, stage.data)
        segment = Segment(self._at.epoch, batches)
        ran, stop = self._run(stage.forward, segment)
        return (stage.forward.score if ran == segment.count else None), stop

    def _no_score(self) -> Score:
        return Score.empty(self._stage.place.job)

    def _result(self, score: Score) -> EpochResult:
        total = score.of_all(processes.sum_over(score.as_list(), self._groups.active))
        has_loss = self._stage.place.job.loss is not None and total.samples
        return EpochResult(
            epoch=self._at.epoch + 1,
            loss=self._history.loss,
            test_correct=total.correct,
            test_judged=total.judged,
            test_loss=total.loss_sum / total.samples if has_loss else None,
            test_metrics=total.metrics,
        )

    def _run(self, engine: Engine, segment: Segment) -> tuple[int, bool]:
        """(minibatches run, whether to stop now). Here, and nowhere else, a stop request comes in."""
        self._stopping.begin()
        engine.limit = self._stopping.limit
        engine.run(segment)
        stop = self._stopping.end()
        return self._stopping.reached(segment.count), stop

    def _stop(self) -> None:
        self._save()
        self.stopped = self._at
        if self._leads:
            announce_stop(f"stopped after {self._at}: --resume goes on from there")

    def _save(self) -> None:
        """A checkpoint of where training is, unless there is one."""
        if self._saved is None or self._saved[0] != self._at:
            folder = saving.save(self._stage, self._groups, self._start.run, self._at, self._history)
            self._saved = self._at, folder
            self._listeners.checkpoint(folder)

    def _save_result(self) -> None:
        """The epoch is evaluated: add that to its checkpoint, if it has one."""
        if self._saved is not None and self._saved[0] == self._at:
            _, folder = self._saved
            together(self._groups.active, lambda: saving.add_result(folder, self._history) if self._leads else None)

    def _set_rates(self) -> None:
        """The learning rates of where training begins. Raises `LaunchError` for a scheduler that cannot be run."""
        rates = self._training.rates
        if rates is None:
            return
        if rates.needs_test_loss and self._stage.test_sizes is None:
            raise LaunchError("ReduceLROnPlateau follows the test loss: give the job's data a test set")
        done = self._at.epoch * self._sizes.count + self._at.minibatch
        rates.catch_up(done, [result.get("test_loss") for result in self._history.results])

    def _run_info(self) -> RunInfo:
        plan, at = self._stage.place.plan, self._at
        return RunInfo(
            folder=self._start.run,
            plan=plan.written(),
            minibatch=plan.minibatch,
            epochs=self._epochs,
            minibatches=self._sizes.count,
            epoch=at.epoch,
            minibatch_of_epoch=at.minibatch,
        )

    def _tell(self, step: Step, progress: Progress) -> None:
        """A minibatch is done at the last stage."""
        progress(step)
        if self._listeners:
            rates = self._training.rates
            self._listeners.minibatch(step, None if rates is None else rates.now, self._training.recorder.pace_s())

    def _say_notes(self) -> None:
        """What the user should know before training begins."""
        place = self._stage.place
        for note in (clipping.note(place), exchanges.note(self._options.averaging, place.plan)):
            if note is not None:
                say(f"note: {note}")
        every, group = self._options.checkpoint_minibatches, minibatches_per_round(self._stage.place.plan)
        if every is not None and every % group:
            say(
                f"note: --checkpoint-minibatches {every} is no multiple of {group}, so updates before a checkpoint "
                "average fewer minibatches"
            )

    def _say_start(self, resumed: Manifest | None) -> None:
        after_fault = self._groups.attempt.after_fault()
        if not after_fault:  # or they have been said
            self._say_notes()
        if resumed is None:
            if after_fault:
                say(f"{after_fault}training begins anew, as there is no checkpoint yet")
            return
        say(f"{after_fault}resumed from {resumed.folder}, after {resumed.position}")
        again = resumed.position.minibatch * resumed.minibatch_samples - self._at.minibatch * self._sizes.minibatch
        if not resumed.position.whole and again:
            say(f"note: with minibatches of {self._sizes.minibatch}, {again} samples of this epoch are run again")


def segment_end(first: int, count: int, every: int | None) -> int:
    """Where the segment that begins with minibatch `first` ends: before a multiple of `every`, or with the epoch."""
    return count if every is None else min(count, (first // every + 1) * every)


def minibatches_per_round(plan: LaunchPlan) -> int:
    """After so many minibatches every stage has made a whole number of updates."""
    return lcm(*(plan.schedule.group_size(shape) for shape in plan.shapes))


def position_in(manifest: Manifest, sizes: Sizes) -> Position:
    """Where a checkpoint is in epochs of minibatches of these sizes. Raises `LaunchError` for other data.

    The order of the samples does not depend on the minibatch, so that its samples say where it is.
    """
    at = manifest.position
    if at.whole:
        evaluated = manifest.finished > at.epoch
        return Position(at.epoch + 1, 0, sizes.count) if evaluated else Position(at.epoch, sizes.count, sizes.count)
    if manifest.samples != sizes.samples:
        raise LaunchError(
            f"{manifest.folder} is in the middle of an epoch over {manifest.samples} samples, and the job's training "
            f"data has {sizes.samples}"
        )
    done = at.minibatch * manifest.minibatch_samples // sizes.minibatch
    return Position(at.epoch, min(done, sizes.count), sizes.count)
