"""`pipeplan profile diff`: compares two profiles layer by layer."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.table import Table
from rich.text import Text

from pipeplan.cli.options import bundled_profiles, complete_names, json_option, quiet_option
from pipeplan.cli.output import print_answer, print_json
from pipeplan.cli.profile.show import ORIGINS
from pipeplan.profile_data.diff import (
    SAME,
    UNKNOWN,
    LayerCosts,
    LayerDiff,
    ProfileDiff,
    compare_profiles,
    diff_document,
    sum_costs,
)
from pipeplan.profile_data.profile import Profile, load_profile
from pipeplan.util.text import one_line
from pipeplan.util.units import show_size, show_time

ROWS = 20
TIME_RATIOS = {"B/A": "total_s", "fwd\nB/A": "forward_s", "bwd\nB/A": "backward_s"}
SIZE_RATIOS = {"weights\nB/A": "parameter_bytes", "kept\nB/A": "saved_bytes", "output\nB/A": "output_bytes"}


@click.command("diff")
@click.argument("first", metavar="A", shell_complete=complete_names(bundled_profiles, ".json"))
@click.argument("second", metavar="B", shell_complete=complete_names(bundled_profiles, ".json"))
@click.option("--top", type=click.IntRange(min=1), default=ROWS, metavar="N", help="Show this number of layers.")
@json_option
@quiet_option
def command(first: str, second: str, top: int, as_json: bool) -> None:
    """Compare two profiles layer by layer. The layers that change the total the most come first.

    A and B are profiles, or names of bundled profiles. Layers of the same name are compared.

    \b
    pipeplan profile diff before.json after.json --top 5
    """
    diff = compare_profiles(load_profile(first), load_profile(second))
    if as_json:
        print_json(diff_document(diff))
        return
    heading, footer = _heading(diff, first, second), _footer(diff)
    print_answer([*map(one_line, heading), "", _table(diff, top), *map(one_line, footer)], wide=True)


def _heading(diff: ProfileDiff, first: str, second: str) -> list[str]:
    structure = "the same edges between them" if diff.same_structure else "not the same layers and edges"
    if diff.graph == UNKNOWN:
        graphs = f"not both traced, {structure}"
    else:
        graphs = f"{diff.graph} by their hashes" + ("" if diff.graph == SAME else f", {structure}")
    lines = [
        f"A: {first}: {_origin(diff.first)}",
        f"B: {second}: {_origin(diff.second)}",
        f"Graphs: {graphs}",
        f"Layers in both: {len(diff.layers)}{_unmatched('A', diff.only_first)}{_unmatched('B', diff.only_second)}",
    ]
    if diff.per_sample:
        sizes = f"{diff.first.minibatch} and {diff.second.minibatch}"
        lines.append(f"Microbatches of {sizes} samples: times, kept and outputs are compared per sample")
    return lines


def _origin(profile: Profile) -> str:
    origin = profile.provenance
    device = origin.device_name or origin.device or "an unnamed device"
    return f"{profile.model_name}, microbatch {profile.minibatch}, {ORIGINS.get(origin.kind, origin.kind)} {device}"


def _unmatched(letter: str, layers: Sequence[LayerDiff]) -> str:
    if not layers:
        return ""
    time = show_time(sum(abs(layer.change_s) for layer in layers))
    return f"; only in {letter}: {len(layers)}, with {time}, such as {layers[0].name}"


def _table(diff: ProfileDiff, top: int) -> Table:
    total_s = diff.totals[0].total_s
    unit, per_second = ("µs", 1e6) if total_s < 0.01 else ("ms", 1e3)
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", overflow="fold")
    for heading in (f"A\n{unit}", f"B\n{unit}", *TIME_RATIOS, "change\nof total", *SIZE_RATIOS):
        table.add_column(heading, justify="right", no_wrap=True)

    def add_row(label: str, first: LayerCosts, second: LayerCosts, *, mark: str = " ", style: str = "") -> None:
        change = (second.total_s - first.total_s) / total_s if total_s else 0.0
        cells = [
            label,
            *(f"{side.total_s * per_second:.3f}" for side in (first, second)),
            *(_ratio(getattr(first, field), getattr(second, field)) for field in TIME_RATIOS.values()),
            f"{change:+.1%}{mark}",
            *(_ratio(getattr(first, field), getattr(second, field)) for field in SIZE_RATIOS.values()),
        ]
        table.add_row(*(Text(one_line(cell), style) for cell in cells))

    labelled = [(layer, layer.name) for layer in diff.layers]
    labelled += [(layer, f"{layer.name} (A only)") for layer in diff.only_first]
    labelled += [(layer, f"{layer.name} (B only)") for layer in diff.only_second]
    labelled.sort(key=lambda one: -abs(one[0].change_s))
    for layer, label in labelled[:top]:
        add_row(label, layer.first, layer.second, mark="*" if layer.beyond_spread else " ")
    if rest := [layer for layer, _ in labelled[top:]]:
        sums = sum_costs(layer.first for layer in rest), sum_costs(layer.second for layer in rest)
        add_row(f"{len(rest)} others", *sums, style="dim")
    add_row("total", *diff.totals, style="bold")
    return table


def _ratio(first: float, second: float) -> str:
    if first == second:
        return "="
    if not first or not second:
        return "gone" if first else "new"
    ratio = second / first
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.3g}"


def _footer(diff: ProfileDiff) -> list[str]:
    first, second = diff.totals
    verdicts = [layer.beyond_spread for layer in diff.layers]
    if any(beyond is not None for beyond in verdicts):
        lines = [f"* beyond the spreads of both: {sum(map(bool, verdicts))} of {len(verdicts)} layers."]
    else:
        lines = ["No spreads to compare with: not both profiles were measured."]
    each = " a sample" if diff.per_sample else ""
    lines.append(
        f"Total: {show_time(first.total_s)} and {show_time(second.total_s)}{each}; weights "
        f"{show_size(first.parameter_bytes)} and {show_size(second.parameter_bytes)}."
    )
    if first.loaded_s and second.loaded_s:
        lines.append(f"With all cores busy: {show_time(first.loaded_s)} and {show_time(second.loaded_s)}{each}.")
    if diff.first.peak_bytes and diff.second.peak_bytes:
        lines.append(f"Peak memory: {show_size(diff.first.peak_bytes)} and {show_size(diff.second.peak_bytes)}.")
    return lines
