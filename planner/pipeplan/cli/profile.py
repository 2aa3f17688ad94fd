"""`pipeplan profile MODEL`: measure a model's layers on this machine."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from pipeplan.errors import InputError
from pipeplan.profile import Layer, Profile

MIB = 2**20


@click.command("profile")
@click.argument("model")
@click.option("--batch", type=int, metavar="N", help="Samples in a minibatch.  [default: the model's own]")
@click.option("--device", default="cpu", metavar="cpu|cuda", show_default=True, help="Where to measure.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("profile.json"),
    show_default=True,
    help="The file to write; one that is there is replaced.",
)
@click.option("--threads", type=int, default=1, metavar="N", show_default=True, help="Threads to compute with.")
@click.option("--repeats", type=int, metavar="N", help="Measured passes.  [default: 3 to 30, as fit in 30 s]")
@click.option("--seed", type=int, default=0, metavar="N", show_default=True, help="Seed of the initial weights.")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON instead of a table.")
def command(
    model: str,
    batch: int | None,
    device: str,
    output: Path,
    threads: int,
    repeats: int | None,
    seed: int,
    as_json: bool,
) -> None:
    """Measure what each layer of MODEL takes: time forward and backward, bytes sent, held and kept for backward.

    MODEL is a bundled name (`pipeplan models` lists them), path/to/file.py:callable or package.module:callable; the
    callable takes nothing and returns a torch module with `example_input_array`, or a pipeplan_launch.Job.
    """
    if output.is_dir():
        raise InputError(f"{output} is a folder: name the file to write, as in -o {output / 'profile.json'}")
    profile = _measure(model, batch, device, threads, repeats, seed)
    profile.save(output)
    if as_json:
        click.echo(json.dumps(profile.to_json(), indent=1))
    else:
        print_profile(profile, Console())
        click.echo(f"Wrote {output}. Next: pipeplan solve --cluster local --workers 3")


def _measure(model: str, batch: int | None, device: str, threads: int, repeats: int | None, seed: int) -> Profile:
    try:
        from pipeplan.profiler import Options, profile_model
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InputError("profiling needs torch: pip install 'pipeplan[torch]'") from error
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    # What the user's code prints goes with the progress: standard output is for the result.
    # The stream itself: while the model is traced, sys.stderr is another one.
    console = Console(file=sys.stderr)
    with (
        Progress(
            *columns, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
        ) as bar,
        redirect_stdout(sys.stderr),
    ):
        task = bar.add_task("loading", total=None)

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total or None, description=what)

        return profile_model(model, Options(batch, device, threads, repeats, seed=seed), show)


def print_profile(profile: Profile, console: Console) -> None:
    """The layers as a table, and how their sum compares with the whole model."""
    made = {layer.name: 0 for layer in profile.layers}
    for tensor in profile.tensors:
        made[tensor.producer] += tensor.bytes
    table = Table(box=None, pad_edge=False)
    for heading in ("layer", "operation"):
        table.add_column(heading, overflow="fold")
    for heading in ("forward\nms", "±", "backward\nms", "±", "output\nMiB", "weights\nMiB", "kept\nMiB"):
        table.add_column(heading, justify="right", no_wrap=True)
    for layer in profile.layers:
        table.add_row(*_row(layer, made[layer.name]))
    where = profile.provenance
    console.print(
        f"{profile.model_name}, minibatch {profile.minibatch}, on {where.device_name or where.device}",
        highlight=False,
        markup=False,
    )
    console.print(table)
    for line in _totals(profile):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _row(layer: Layer, made: int) -> list[Text]:
    times = (layer.forward_s, layer.forward_spread_s, layer.backward_s, layer.backward_spread_s)
    sizes = (made, layer.parameter_bytes, layer.saved_bytes)
    cells = [layer.name, layer.op, *(f"{time * 1e3:.3f}" for time in times), *(f"{size / MIB:.2f}" for size in sizes)]
    return [Text(cell) for cell in cells]


def _totals(profile: Profile) -> list[str]:
    forward = sum(layer.forward_s for layer in profile.layers)
    backward = sum(layer.backward_s for layer in profile.layers)
    lines = [f"± is the interquartile range of {profile.provenance.repeats} passes."]
    if profile.whole_forward_s and profile.whole_backward_s:
        whole_forward, whole_backward = profile.whole_forward_s, profile.whole_backward_s
        lines.append(
            f"Sum of the layers: forward {forward * 1e3:.2f} ms, backward {backward * 1e3:.2f} ms. "
            f"The whole model: {whole_forward * 1e3:.2f} ms, {whole_backward * 1e3:.2f} ms. "
            f"Sum / whole: {forward / whole_forward:.2f}, {backward / whole_backward:.2f}."
        )
    return lines
