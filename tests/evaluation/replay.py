"""Runs a plan on emulated servers of this machine, and compares it with its predictions. docs/evidence/replay.md.

    PYTHONPATH=tests/support python tests/evaluation/replay.py [PLAN] [--seconds 20] [--fault KIND[:WHERE][@WHEN]]
        [--timeout S] [--profile FILE] [--keep FOLDER] [--json]

The executor, its messages and its all-reduces are real; links are shaped, and computing is replaced by sleeping as long
as the profile says. With --fault the plan's launchers run it, and a fault strikes in the middle: the exit status is 1
if they did not react as the executor promises.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from fault_contract import FaultReplayed
from fault_replay import replay_fault
from replay_measure import ReplayResult
from replay_run import SECONDS, ReplaySettings, replay_plan
from rich import box
from rich.console import Console
from rich.table import Table

from pipeplan.errors import InputError
from pipeplan.problem import plan_file
from pipeplan.problem.plan_profile import profile_if_found
from pipeplan.util.units import show_size, show_time

NOT_AS_PROMISED, WRONG, INTERRUPTED = 1, 2, 130
LEAST_S = 1e-6
"""Shorter times are printed as 0."""


def show_replay(replayed: ReplayResult, console: Console) -> None:
    """Print the result of a replay."""
    console.print(_headline(replayed), soft_wrap=True)
    tables = [_stages(replayed)] + ([_links(replayed)] if replayed.links else [])
    for table in tables:
        console.print()
        console.print(table)
    console.print()
    if replayed.unshaped:
        inside = " and ".join(f"a {name}" for name in replayed.unshaped)
        console.print(f"Links inside {inside} are not shaped: they are as fast as this machine.", soft_wrap=True)
    console.print(replayed.cause, soft_wrap=True)


def _headline(replayed: ReplayResult) -> str:
    simulated = f", simulated {show_time(replayed.simulated_s)}" if replayed.simulated_s is not None else ""
    cores = "" if replayed.cores_busy is None else f", cores at work {replayed.cores_busy:.0%} of the time"
    return (
        f"Plan {replayed.config}: predicted {show_time(replayed.predicted_s)} a minibatch{simulated}, replayed "
        f"{show_time(replayed.measured_s)} ± {replayed.spread:.1%} over {replayed.minibatches} minibatches: "
        f"{replayed.error:+.1%}.\nBytes are divided by {replayed.scaling.bytes_by:.0f}, times stretched by "
        f"{replayed.scaling.time_by:.3g}; {replayed.seconds:.0f} s in all{cores}."
    )


def _stages(replayed: ReplayResult) -> Table:
    table = _table("stage", "repl.", "computes", "pred.", "sync", "waits", "sends", "busy", "pred.")
    for number, stage in enumerate(replayed.stages, 1):
        times = [stage.computing_s, stage.predicted_s, stage.sync_s, stage.wait_s, stage.send_s]
        busy = f"{stage.busy(replayed.measured_s):.0%}", f"{stage.predicted_busy(replayed.predicted_s):.0%}"
        table.add_row(str(number), str(stage.replicas), *map(_time, times), *busy)
    return table


def _links(replayed: ReplayResult) -> Table:
    table = _table("link of", "Gbit/s", "way", "a minibatch", "pred.", "busy", "pred.")
    for link in replayed.links:
        sizes = [show_size(round(size)) for size in (link.bytes_per_minibatch, link.predicted_bytes)]
        rate = f"{link.rate * 8 / 1e9:.3g}"
        table.add_row(link.name, rate, link.direction, *sizes, f"{link.busy:.0%}", f"{link.predicted_busy:.0%}")
    return table


def _time(seconds: float) -> str:
    return "0" if seconds < LEAST_S else show_time(seconds)


def _table(first: str, *others: str) -> Table:
    table = Table(first, box=box.SIMPLE, pad_edge=False, show_edge=False)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def show_fault_replay(replayed: FaultReplayed, console: Console) -> None:
    """Print the result of a replay with a fault."""
    console.print(f"Plan {replayed.config}, {replayed.fault}, after {_minibatches(replayed.struck_after)}.")
    console.print(f"promised: {replayed.promised}", soft_wrap=True)
    console.print(f"happened: {_happened(replayed)}", soft_wrap=True)
    for line in replayed.said:
        console.print(f"said:     {line}", soft_wrap=True)
    verdict = "as promised" if replayed.kept else f"NOT as promised: {'; '.join(replayed.broken)}"
    console.print(
        f"{verdict}. Times are of the emulation, whose minibatches are stretched by {replayed.time_by:.3g}; "
        f"{replayed.seconds:.0f} s in all.",
        soft_wrap=True,
    )


def _happened(replayed: FaultReplayed) -> str:
    parts = []
    if replayed.noticed_s is None:
        parts.append("no worker ended")
    else:
        parts.append(f"noticed after {replayed.noticed_s:.1f} s")
        if replayed.all_ended_s is not None:
            parts.append(f"all workers had ended after {replayed.all_ended_s:.1f} s")
    if replayed.back_s is not None:
        parts.append(f"the first minibatch after it was done after {replayed.back_s:.1f} s")
    if replayed.over_s is not None:
        parts.append(f"all was over after {replayed.over_s:.1f} s")
    parts.append(f"{replayed.restarts or 'no'} restart{'' if replayed.restarts == 1 else 's'}")
    parts.append(f"{replayed.done} of {_minibatches(replayed.minibatches)} done")
    return ", ".join(parts)


def _minibatches(count: int) -> str:
    return f"{count} minibatch{'' if count == 1 else 'es'}"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds <= 3600:
        raise ValueError
    return seconds


def _arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, nargs="?", default=Path("plan"))
    parser.add_argument("--profile", type=Path, help="the profile that the plan was made from")
    parser.add_argument("--seconds", type=_seconds, default=SECONDS, help="duration of the run")
    parser.add_argument("--fault", help="cut:server1, flap:server1:3s, kill:worker3 or freeze:worker3, @20 or @5s")
    parser.add_argument("--timeout", type=_seconds, help="with --fault: the executor's --timeout in seconds")
    parser.add_argument("--keep", type=Path, help="keep the run folder and logs in this folder")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(words)


def main(words: list[str]) -> int:
    """Replay a plan, print the result, and return the exit status."""
    given, console = _arguments(words), Console(highlight=False, markup=False)
    if given.timeout is not None and given.fault is None:
        raise InputError("--timeout is for a replay with a --fault: give one, or leave it out")
    path, root = plan_file.plan_file(given.plan), plan_file.read_plan_document(given.plan)
    layers = profile_if_found(root, path, given.profile)  # without it, each stage is replayed as one layer
    if given.fault is None:
        replayed = replay_plan(given.plan, layers, ReplaySettings(given.seconds, given.keep))
        print(json.dumps(replayed.to_json(), indent=1)) if given.json else show_replay(replayed, console)
        return 0
    broken = replay_fault(given.plan, layers, given.fault, given.seconds, given.timeout, given.keep)
    print(json.dumps(broken.to_json(), indent=1)) if given.json else show_fault_replay(broken, console)
    return 0 if broken.kept else NOT_AS_PROMISED


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(WRONG)
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
