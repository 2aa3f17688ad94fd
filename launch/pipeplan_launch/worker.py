"""One worker of a plan from start to end: join the others, build the stage, train or infer, report."""

from __future__ import annotations

import json
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeplan_launch.checkpoint.manifest import Manifest
from pipeplan_launch.checkpoint.optimizer_state import optimizer_tensors
from pipeplan_launch.devices.backend import backend_of
from pipeplan_launch.devices.selftest_cache import remembered_transport
from pipeplan_launch.elastic import consistency_check, process_groups, restart_state
from pipeplan_launch.elastic.graceful_stop import GracefulStop, request_stop
from pipeplan_launch.elastic.link_check import check_planned_links
from pipeplan_launch.elastic.process_groups import FailedElsewhere, Groups, run_in_all
from pipeplan_launch.elastic.signals import Interrupted, check_any_signal, handle_requests_with
from pipeplan_launch.errors import LaunchError, PeerLost, print_status
from pipeplan_launch.files import write_json
from pipeplan_launch.job.callbacks import CallbackList, accuracy_text
from pipeplan_launch.job.nested_tensors import own_part
from pipeplan_launch.job.user_code import describe_error
from pipeplan_launch.job_reference import change_note, job_file
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.run_options import MODES, asks_self_test, memory_note, transport_of, updates_sentence
from pipeplan_launch.plan.stage_files import load_plan
from pipeplan_launch.runtime.action_stream import run_stages
from pipeplan_launch.runtime.data import Batches
from pipeplan_launch.runtime.engine import Segment
from pipeplan_launch.runtime.epochs import EpochLoop
from pipeplan_launch.runtime.inference import Score
from pipeplan_launch.runtime.run_start import RunStart, build_own_stage, decide_start, restore_in_all
from pipeplan_launch.runtime.stage_setup import Engines, RunOptions, WorkerStage
from pipeplan_launch.telemetry import run_folder
from pipeplan_launch.telemetry.memory import keep_freed_memory, reset_peak, resident_memory
from pipeplan_launch.telemetry.recorder import Recorder
from pipeplan_launch.telemetry.summary import WorkerReport, summarise, summary_table


class UnexpectedError(Exception):
    """An error that the executor did not foresee, in one line."""


def run_worker(options: RunOptions) -> None:
    """Run one worker of the plan in `options`.

    Raises `LaunchError` (`PeerLost` after a fault that allows a restart), `FailedElsewhere`, `Interrupted` or
    `UnexpectedError`.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    plan = load_plan(options.plan_folder)
    options = replace(options, averaging=options.averaging.by_default_of(plan))
    keep_freed_memory()
    asks = asks_self_test(options.transport, plan, options.averaging)
    found = remembered_transport(MODES) if asks else None
    transport = transport_of(options.transport, plan, options.averaging, found)
    groups = process_groups.join_workers(plan, options.timeout_s, transport)
    rank = dist.get_rank()
    run_start = run_in_all(groups.everyone, lambda: decide_start(options, plan, groups.attempt) if rank == 0 else None)
    run_start = process_groups.broadcast(run_start, 0, groups.everyone, RunStart)
    assert run_start is not None
    if run_start.finished is not None:
        if rank == 0:
            done = f"{run_start.run} has {run_start.finished} epochs"
            print_status(f"nothing left to do: {done}; give --epochs more than that to go on")
        process_groups.wait_for(groups.everyone)
        dist.destroy_process_group()
        return
    try:
        for note in check_planned_links(plan, groups, options.probe_s):
            print_status(note)
        _build_and_run(options, plan, groups, run_start)
    except PeerLost as error:
        check_any_signal()  # after a signal, a lost peer was asked to stop too
        line = f"{error}{groups.assignment.hosts_text(rank, error.peers)}"
        if process_groups.will_restart() or run_folder.claim_error(run_start.run, line):
            raise PeerLost(line, error.peers) from error
        raise FailedElsewhere from error
    except LaunchError as error:
        if run_folder.claim_error(run_start.run, str(error)):
            raise
        raise FailedElsewhere from error
    except Interrupted as signal:
        if run_folder.has_failed(run_start.run):
            raise FailedElsewhere from signal
        raise
    except FailedElsewhere:
        raise
    except Exception as error:
        raise _unexpected(run_start.run, plan, error) from error
    dist.destroy_process_group()


def _build_and_run(options: RunOptions, plan: LaunchPlan, groups: Groups, run_start: RunStart) -> None:
    engines = _engines(options, plan, groups)
    stage = run_in_all(groups.everyone, lambda: build_own_stage(options, plan, groups, run_start, engines))
    own = [] if stage is None else [one.fingerprint for one in stage.every]
    gathered = process_groups.gather_everywhere(own, groups.everyone, list[consistency_check.Fingerprint])
    fingerprints = [one for worker in gathered for one in worker]
    run_in_all(groups.everyone, lambda: consistency_check.check_agreement(fingerprints))
    shared = {stages for one in fingerprints for stages in one.shared_by()}
    sharing = process_groups.shared_groups(plan, shared, groups, options.timeout_s)
    if stage is not None and stage.training is not None:
        stage.training.share(sharing)
    run_start, resumed = restore_in_all(stage, options, groups, run_start)
    if stage is not None:
        ActiveWorker(options, plan, groups, stage, run_start, resumed).run()
    else:
        store = groups.attempt.attempt_store
        handle_requests_with(lambda: request_stop(store))  # passed on to the workers that train
    process_groups.wait_for(groups.everyone)


def _engines(options: RunOptions, plan: LaunchPlan, groups: Groups) -> Engines:
    if not options.runs_own_module(plan):
        return Engines(options, groups)
    from pipeplan_launch.data_parallel.training import (
        DataParallelEngines,  # importing FSDP takes long, and a pipeline does not need it
    )

    return DataParallelEngines(options, groups)


def _unexpected(run: Path, plan: LaunchPlan, error: Exception) -> Exception:
    """The exception for an unforeseen error, whose traceback is written to the run folder.

    Returns `FailedElsewhere` if another worker has reported an error before.
    """
    rank = dist.get_rank()
    place = plan.place(rank)
    where = f"rank {rank}, {'idle' if place is None else f'stage {place[0]}'}"
    path = run_folder.save_traceback(run, rank, "".join(traceback.format_exception(error)))
    message = f"something failed unexpectedly ({where}): {describe_error(error)}"
    if not run_folder.claim_error(run, message):
        return FailedElsewhere()
    return UnexpectedError(message + (f"; the traceback is in {path}" if path else ""))


class ActiveWorker:
    """Trains or infers on a worker that belongs to a stage, and reports the result."""

    def __init__(
        self,
        options: RunOptions,
        plan: LaunchPlan,
        groups: Groups,
        stage: WorkerStage,
        run_start: RunStart,
        resumed: Manifest | None,
    ) -> None:
        self._options = options
        self._plan = plan
        self._groups = groups
        self._stage = stage
        self._start = run_start
        self._resumed = resumed
        self._leader = plan.active[0]
        place = stage.place
        self._is_leader = place.rank == self._leader
        self._outcome: str | None = None
        """The last line of the report."""
        self._prints_status = place.is_last and place.replica == 0
        state: list[torch.Tensor] = []
        for one in stage.every:
            program = one.place.program
            state += [*program.parameters_by_name().values(), *program.buffers_by_name().values()]
            if one.training is not None:
                state += optimizer_tensors(one.training.optimizer)  # state that a checkpoint may have restored
        reset_peak()
        state_bytes = sum(own_part(tensor).nbytes for tensor in state)
        memory = resident_memory()
        self._memory_before_bytes = memory.now_bytes - memory.code_bytes - state_bytes

    def run(self) -> None:
        """Train or infer, then report."""
        restart_prefix = self._groups.attempt.restart_prefix()
        if self._prints_status and not restart_prefix:
            print_status(f"plan {self._plan.written()}, minibatch {self._plan.minibatch}, run folder {self._start.run}")
            if self._plan.schedule.trains:
                print_status(updates_sentence(self._plan))
            if self._groups.edges is not None and (beyond := memory_note(self._plan)) is not None:
                print_status(beyond)
            for sizes in (self._stage.train_sizes, self._stage.test_sizes):
                if sizes is not None and sizes.note:
                    print_status(f"note: {sizes.note}")
            reference = self._plan.model_ref
            if (changed := change_note(reference, self._plan.model_file, job_file(reference))) is not None:
                same = "" if self._options.runs_own_module(self._plan) else "; the graph is the same"
                print_status(f"note: {changed}{same}")
        extra = self._train() if self._plan.mode == "training" else self._infer()
        for one in self._stage.every:
            (one.training or one.forward).recorder.close()
        self._report(extra)

    @property
    def _recorder(self) -> Recorder:
        return (self._stage.training or self._stage.forward).recorder

    def _train(self) -> dict[str, Any]:
        stopping = GracefulStop(self._groups.attempt.attempt_store, self._plan)
        loop = EpochLoop(self._options, self._groups, self._stage, self._start, self._resumed, stopping)
        restart_state.record_begun()
        extra = loop.run()
        if loop.results and loop.results[-1].test_judged:
            last = loop.results[-1]
            accuracy = accuracy_text(last.test_correct, last.test_judged)
            self._outcome = f"test {accuracy} after epoch {last.epoch}"
        elif loop.results and loop.results[-1].test_loss is not None:
            self._outcome = f"test loss {loop.results[-1].test_loss:.4f} after epoch {loop.results[-1].epoch}"
        return extra

    def _infer(self) -> dict[str, Any]:
        passes, has_loss = self._options.epochs or 1, self._stage.place.job.loss is not None
        restart_prefix = self._groups.attempt.restart_prefix()
        if self._prints_status and restart_prefix:
            print_status(f"{restart_prefix}inference begins anew")
        restart_state.record_begun()
        self._stage.forward.on_minibatch = None
        for number in range(passes):
            met_s = process_groups.synchronise_workers(self._groups.active)
            begun = time.perf_counter()
            score = self._infer_once(number, met_s)
            self._stage.forward.timeline.write(self._start.run)
            total = score.from_sum(process_groups.sum_over(score.as_list(), self._groups.active))
            taken = time.perf_counter() - begun
            self._recorder.end_epoch()
            if self._prints_status:
                print_status(f"pass {number + 1}/{passes}  {total.text(has_loss=has_loss)}")
        rate = total.samples / taken
        self._outcome = f"{total.text(has_loss=has_loss)}, {rate:.1f} samples/s"
        return {
            "accuracy": total.accuracy,
            "correct": total.correct,
            "samples": total.samples,
            "samples_per_s": rate,
        } | ({"metrics": total.metrics} if total.metrics else {})

    def _infer_once(self, number: int, met_s: float) -> Score:
        stage = self._stage
        data: Any = stage.data.test if stage.data.test is not None else stage.data.train
        assert stage.test_sizes is not None
        batches = Batches(data, stage.test_sizes, self._start.seed, number, stage.data)
        segment = Segment(number, batches)
        stage.forward.timeline.begin(number, 0, segment.count, met_s)
        run_stages([stage.forward], segment)
        return stage.forward.score

    def _report(self, extra: dict[str, Any]) -> None:
        place, peak = self._stage.place, self._peak()
        own = [
            WorkerReport(
                place.rank, one.place.stage, place.replica, (one.training or one.forward).recorder.steady, peak
            )
            for one in self._stage.every
        ]
        gathered = process_groups.gather_at(own, self._leader, self._groups.active, list[WorkerReport])
        reports = [report for worker in gathered for report in worker]
        summary: dict[str, Any] | None = None
        if self._is_leader:
            summary = summarise(self._plan, reports) | {"seed": self._start.seed, "torch": torch.__version__} | extra
            self._print(summary)
        if place.job.callbacks and self._plan.mode == "training":
            text = process_groups.broadcast(json.dumps(summary), self._leader, self._groups.active, str)
            summary = json.loads(text)
            if self._prints_status and summary is not None:
                CallbackList(place.job.callbacks).end(summary)

    def _print(self, summary: dict[str, Any]) -> None:
        write_json(self._start.run / "summary.json", summary)
        with suppress(OSError):  # after SIGHUP there may be nobody to read it
            print(summary_table(summary))
            if self._outcome is not None:
                print(self._outcome)
            print(f"run folder: {self._start.run}", flush=True)

    def _peak(self) -> int:
        """Peak memory to compare with the plan: of the device, or on the CPU the memory that training added.

        On the CPU it includes the planned memory of the worker itself. It excludes the data set, and code that is
        loaded at first use.
        """
        device = self._stage.place.device
        on_device = backend_of(device).peak_bytes(device)
        if on_device is not None:
            return on_device
        own = self._plan.predictions[self._stage.place.stage].worker_bytes or 0
        memory = resident_memory()
        return round(own) + max(0, memory.peak_bytes - memory.code_bytes - self._memory_before_bytes)
