"""A replay as people read it."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from pipeplan.emulate.outcome import Replayed
from pipeplan.units import show_size, show_time


def show(replayed: Replayed, console: Console) -> None:
    """Print a replay."""
    console.print(_headline(replayed), soft_wrap=True)
    console.print(_stages(replayed))
    if replayed.links:
        console.print(_links(replayed))
    if replayed.cause:
        console.print(replayed.cause, soft_wrap=True)


def _headline(replayed: Replayed) -> str:
    simulated = f", simulated {show_time(replayed.simulated_s)}" if replayed.simulated_s is not None else ""
    return (
        f"Plan {replayed.config}: predicted {show_time(replayed.predicted_s)} a minibatch{simulated}, replayed "
        f"{show_time(replayed.measured_s)} ± {replayed.spread:.1%} over {replayed.minibatches} minibatches: "
        f"{replayed.error:+.1%}.\nBytes are divided by {replayed.scaling.bytes_by:.0f}, times stretched by "
        f"{replayed.scaling.time_by:.3g}; {replayed.seconds:.0f} s in all."
    )


def _stages(replayed: Replayed) -> Table:
    table = Table(
        "stage", "repl.", "computing", "of it predicted", "sync", "waiting", "sending", "busy", box=box.SIMPLE
    )
    for number, stage in enumerate(replayed.stages, 1):
        computing = stage.forward_s + stage.backward_s + stage.update_s
        times = [computing, stage.predicted_s, stage.sync_s, stage.wait_s, stage.send_s]
        table.add_row(
            str(number), str(stage.replicas), *map(show_time, times), f"{stage.busy(replayed.measured_s):.0%}"
        )
    return table


def _links(replayed: Replayed) -> Table:
    table = Table("link of", "rate Gbit/s", "way", "a minibatch", "busy", box=box.SIMPLE)
    for link in replayed.links:
        size = show_size(round(link.bytes_per_minibatch))
        table.add_row(link.name, f"{link.rate * 8 / 1e9:.3g}", link.direction, size, f"{link.busy:.0%}")
    return table
