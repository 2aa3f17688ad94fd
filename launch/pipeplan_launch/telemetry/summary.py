"""Predicted and measured times side by side: summary.json, and the table at the end of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import structs

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.files import read_file
from pipeplan_launch.plan.launch_plan import LaunchPlan, Prediction
from pipeplan_launch.plan.schedule import SCHEDULES
from pipeplan_launch.telemetry.difference import AS_PREDICTED, difference, difference_lines, first_cause
from pipeplan_launch.telemetry.recorder import SUMMED_FIELDS, TIME_FIELDS, SteadyState
from pipeplan_launch.telemetry.run_folder import SUMMARY_FORMAT, SUMMARY_VERSION, SummaryFile
from pipeplan_launch.typed_document import decode, parse_json


@dataclass(frozen=True)
class WorkerReport:
    """The measurements that a worker sends to the worker that prints the summary."""

    rank: int
    stage: int
    replica: int
    steady: SteadyState
    memory_bytes: int
    """Peak memory that the stage added to the worker's process, including training."""


def _pair(predicted: float | None, measured: float | None) -> dict[str, float | None]:
    """A predicted and a measured value, in the same unit, for summary.json; `ratio` is measured over predicted."""
    ratio = measured / predicted if predicted and measured is not None else None
    return {"predicted": predicted, "measured": measured, "ratio": ratio}


def summarise(plan: LaunchPlan, reports: Sequence[WorkerReport]) -> dict[str, Any]:
    """Compare the plan's predictions with the workers' measurements in the steady state.

    Times are seconds per minibatch on one replica of the stage; `minibatch_s` is the pipeline's step time. `sync_s` is
    a worker's time in the all-reduce, including waiting for slower replicas; its prediction is the exposed all-reduce
    time. `wait_s` is waiting for other stages; its prediction is replicas × step time minus the worker's busy time.
    """
    last = [report for report in reports if report.stage == len(plan.pipeline) - 1]
    step_times = [report.steady.step_time_s for report in last if report.steady.step_time_s is not None]
    step_time = sum(step_times) / len(step_times) if step_times else None
    stages, others = [], _blamed_on_others(plan, reports)
    for stage, prediction in enumerate(plan.predictions):
        mine = [report for report in reports if report.stage == stage]
        stages.append(_stage(plan, stage, prediction, mine, others, _other_s(plan, mine, reports)))
    summary: dict[str, Any] = {
        "format": SUMMARY_FORMAT,
        "version": SUMMARY_VERSION,
        "plan": plan.plan,
        "mode": plan.mode,
        "schedule": plan.schedule.name,
        "accumulate": plan.accumulate,
        "server_sizes": [plan.workers_on(server) for server in range(plan.servers)],
        "replicas": plan.written(),
        "minibatch": plan.minibatch,
        "profile": plan.profile,
        "device": plan.device,
        "emulated": bool(plan.emulated),
        "minibatch_s": _pair(plan.predictions[0].minibatch_s, step_time),
        "includes_fill": any(report.steady.includes_fill for report in last),
        "steady_minibatches": sum(report.steady.minibatches for report in last),
        "stages": stages,
    }
    if plan.schedule.virtual is not None:  # the causes assume workers with one stage each
        return summary | {"cause": None, "difference_s": {}}
    cause = first_cause(summary)
    return summary | {"cause": None if cause is None else structs.asdict(cause), "difference_s": difference(summary)}


def _blamed_on_others(plan: LaunchPlan, reports: Sequence[WorkerReport]) -> dict[int, float]:
    """For each rank: the share of the worker's wait for a core that other programs can explain.

    Workers also wait for each other, if there are more workers than cores, or if two are on one core for a while. The
    workers of a server together wait for other programs at most as long as these programs used the cores: the cores'
    busy time minus the workers' own processor time.
    """
    shares: dict[int, float] = {}
    first = 0
    for server in range(plan.servers):
        inside = range(first, first + plan.workers_on(server))
        first = inside.stop
        here = [one for one in reports if one.rank in inside and one.steady.watched_s > 0 and one.steady.span_s > 0]
        busy = {one.steady.cores: one.steady.cores_busy_s / one.steady.watched_s for one in here}
        others = sum(busy.values()) - sum(one.steady.own_cpu_s / one.steady.watched_s for one in here)
        waited = sum((one.steady.seconds or {}).get("core_wait_s", 0.0) / one.steady.span_s for one in here)
        share = min(1.0, max(0.0, others) / waited) if waited > 0 else 0.0
        shares |= {one.rank: share for one in here}
    return shares


def _stage(
    plan: LaunchPlan,
    stage: int,
    prediction: Prediction,
    reports: Sequence[WorkerReport],
    others: Mapping[int, float],
    other_s: float | None,
) -> dict[str, Any]:
    count = sum(report.steady.minibatches for report in reports)
    means: dict[str, float | None] = {
        name: sum((report.steady.seconds or {}).get(name, 0.0) for report in reports) / count if count else None
        for name in SUMMED_FIELDS
    }
    own = {name: means[name] for name in ("wait_s", "load_s", "send_s")}
    blamed = sum((one.steady.seconds or {}).get("core_wait_s", 0.0) * others.get(one.rank, 0.0) for one in reports)
    return {
        "stage": stage,
        "workers": list(plan.pipeline[stage].workers),
        "versions": plan.pipeline[stage].versions,
        "cores": prediction.cores,
        "boundary_s": prediction.boundary_s,
        **({} if prediction.executor_s is None else {"executor_s": prediction.executor_s}),
        "forward_s": _pair(prediction.forward_s, means["forward_s"]),
        "backward_s": _pair(prediction.backward_s, means["backward_s"]),
        "update_s": _pair(prediction.update_s, means["update_s"]),
        "sync_s": _pair(prediction.exposed_s, means["sync_s"]),
        "wait_s": _pair(prediction.wait_s, means["wait_s"]),
        "memory_bytes": _pair(prediction.memory_bytes, max((r.memory_bytes for r in reports), default=None)),
        "measured": own
        | {"other_s": other_s, "cpu_s": means["cpu_s"], "core_wait_s": means["core_wait_s"]}
        | {"others_wait_s": blamed / count if count else None},
    }


def _other_s(plan: LaunchPlan, reports: Sequence[WorkerReport], everyone: Sequence[WorkerReport]) -> float | None:
    """Unrecorded time, which the executor itself takes, in seconds per minibatch of a worker.

    `reports`: the reports of one stage. A worker with several stages has this time once, divided equally among them.
    """
    unrecorded = []
    for report in reports:
        step_time, own = report.steady.step_time_s, [one for one in everyone if one.rank == report.rank]
        if step_time is not None and report.steady.minibatches:
            recorded = sum(_recorded_s(one) for one in own)
            unrecorded.append(max(0.0, step_time * len(plan.pipeline[report.stage].workers) - recorded) / len(own))
    return sum(unrecorded) / len(unrecorded) if unrecorded else None


def _recorded_s(report: WorkerReport) -> float:
    """The sum of all recorded times of a stage on one worker, per minibatch."""
    seconds, count = report.steady.seconds or {}, report.steady.minibatches
    return sum(seconds.get(name, 0.0) for name in TIME_FIELDS) / count if count else 0.0


def covers_epochs(run: Path, epochs: int) -> bool:
    """Whether a run's summary covers this number of epochs. If not, the run ended before it wrote a summary."""
    path = run / "summary.json"
    try:
        return len(decode(parse_json(read_file(path)), SummaryFile, str(path)).epochs) >= epochs
    except (OSError, ValueError, RecursionError, LaunchError):
        return False


def summary_table(summary: dict[str, Any]) -> str:
    """The summary as the table at the end of a run."""
    trains = summary["mode"] == "training"
    titles = {"forward_s": "forward", "backward_s": "backward", "update_s": "update", "sync_s": "sync"}
    titles |= {"wait_s": "waiting", "memory_bytes": "memory MiB"}
    columns = list(titles) if trains else ["forward_s", "wait_s", "memory_bytes"]
    scale = {"memory_bytes": 2**-20}
    others = {"load_s": "load", "send_s": "send", "other_s": "other"}
    rows = [["stage", "workers", *(titles[name] for name in columns), *others.values()]]
    for stage in summary["stages"]:
        cells = [_cell(stage[name], scale.get(name, 1e3)) for name in columns]
        cells += [_number(stage["measured"][name], 1e3) for name in others]
        rows.append([str(stage["stage"]), _ranks(stage["workers"]), *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["predicted -> measured, ms per minibatch on one worker, steady state"]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.append(_throughput_line(summary))
    lines += difference_lines(summary)
    lines.append(_cause_line(summary))
    return "\n".join(line for line in lines if line)


def _cause_line(summary: dict[str, Any]) -> str:
    step_time, cause = summary["minibatch_s"], summary["cause"]
    if cause is not None:
        return f"first cause: {cause['text']}"
    if step_time["ratio"] is None:
        return ""
    if abs(step_time["ratio"] - 1) <= AS_PREDICTED:
        return f"as predicted, within {AS_PREDICTED:.0%}"
    if (schedule := SCHEDULES.get(summary.get("schedule", ""))) is not None and schedule.virtual is not None:
        return "first cause: not known, as workers run several stages each"
    return "first cause: not known, as some times were not predicted or not measured"


def _throughput_line(summary: dict[str, Any]) -> str:
    measured, predicted = summary["minibatch_s"]["measured"], summary["minibatch_s"]["predicted"]
    if not measured:
        return "throughput: too few minibatches to measure"
    per_second = 1 / measured
    images = per_second * summary["minibatch"]
    line = f"throughput: measured {per_second:.2f} minibatches/s ({images:.0f} samples/s)"
    if predicted:
        line += f", predicted {1 / predicted:.2f}: {predicted / measured:.0%} of the prediction"
    fill = "fill included: the epochs are too short" if summary["includes_fill"] else "the fill of every epoch left out"
    return f"{line} ({fill})"


def _cell(pair: dict[str, float | None], scale: float) -> str:
    return f"{_number(pair['predicted'], scale)} -> {_number(pair['measured'], scale)}"


def _number(value: float | None, scale: float) -> str:
    if value is None:
        return "?"
    scaled = value * scale
    return f"{scaled:.0f}" if scaled >= 100 else f"{scaled:.3g}"


def _ranks(workers: Sequence[int]) -> str:
    """Ranks as text: `0-3,7` for the workers 0, 1, 2, 3 and 7."""
    ranges: list[list[int]] = []
    for worker in sorted(workers):
        if ranges and worker == ranges[-1][-1] + 1:
            ranges[-1].append(worker)
        else:
            ranges.append([worker])
    return ",".join(str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in ranges)
