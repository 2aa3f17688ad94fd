"""The printed result of a replay with a fault."""

from __future__ import annotations

from rich.console import Console

from pipeplan.replay.fault_contract import FaultReplayed


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
