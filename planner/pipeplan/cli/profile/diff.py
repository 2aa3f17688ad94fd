"""`pipeplan profile diff`: compare two profiles layer by layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import click
from rich.table import Table
from rich.text import Text

from pipeplan.bundled_profiles import read
from pipeplan.cli.options import bundled_profiles, completing, json_option, quiet_option
from pipeplan.cli.output import print_answer, print_json
from pipeplan.cli.profile.show import KINDS
from pipeplan.profile_data import Profile
from pipeplan.profile_diff import SAME, UNKNOWN, Difference, Row, Side, compare, document
from pipeplan.text import one_line
from pipeplan.units import show_size, show_time

ROWS = 20
NOTHING = Side(0.0, 0.0, 0.0, 0, 0.0, 0.0)


@click.command("diff")
@click.argument("first", metavar="A", shell_complete=completing(bundled_profiles, ".json"))
@click.argument("second", metavar="B", shell_complete=completing(bundled_profiles, ".json"))
@click.option(
    "--top", type=click.IntRange(min=1), default=ROWS, metavar="N", show_default=True, help="Number of layers to show."
)
@json_option
@quiet_option
def command(first: str, second: str, top: int, as_json: bool) -> None:
    """Compare two profiles layer by layer, sorted by how much each layer changes the total time.

    A and B are profile files, or names of bundled profiles. Layers are matched by name, or if tools name them
    differently, by their order, kind and weights.

    \b
    pipeplan profile diff before.json after.json
    pipeplan profile diff vgg16-v100 imported.json --top 5
    """
    found = compare(read(first), read(second))
    if as_json:
        print_json(document(found))
        return
    heading, totals = _heading(found, (first, second)), _totals(found)
    print_answer([*map(one_line, heading), "", _table(found, top), *map(one_line, totals)], wide=True)


def _heading(found: Difference, names: tuple[str, str]) -> list[str]:
    lines = [
        _described(letter, name, one)
        for letter, name, one in zip("AB", names, (found.first, found.second), strict=True)
    ]
    structure = "the same edges between them" if found.same_structure else "not the same layers and edges"
    if found.graph == UNKNOWN:
        lines.append(f"Graphs: not both traced, {structure} by what was matched")
    else:
        lines.append(f"Graphs: {found.graph} by their hashes" + ("" if found.graph == SAME else f", {structure}"))
    counts = Counter(row.by for row in found.rows)
    matched = ", ".join(f"{count} by {how}" for how, count in counts.items()) or "none"
    lines.append(f"Layers matched: {matched}{_unmatched('A', found.only_first)}{_unmatched('B', found.only_second)}")
    if found.per_sample:
        sizes = f"{found.first.minibatch} and {found.second.minibatch}"
        lines.append(f"Minibatches of {sizes} samples: times, kept and outputs are compared per sample")
    return lines


def _described(letter: str, name: str, profile: Profile) -> str:
    origin = profile.provenance
    where = origin.device_name or origin.device or "an unnamed device"
    kind = KINDS.get(origin.kind, origin.kind)
    return f"{letter}: {name}: {profile.model_name}, minibatch {profile.minibatch}, {kind} {where}"


def _unmatched(letter: str, sides: Sequence[tuple[str, Side]]) -> str:
    if not sides:
        return ""
    time = show_time(sum(side.total_s for _, side in sides))
    return f"; only in {letter}: {len(sides)}, with {time}, such as {sides[0][0]}"


def _table(found: Difference, top: int) -> Table:
    unit, per_second = ("µs", 1e6) if found.totals[0].total_s < 0.01 else ("ms", 1e3)
    table = Table(box=None, pad_edge=False)
    table.add_column("layer", overflow="fold")
    for heading in (f"A\n{unit}", f"B\n{unit}", "B/A", "fwd\nB/A", "bwd\nB/A", "change\nof total"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("weights\nB/A", "kept\nB/A", "output\nB/A"):
        table.add_column(heading, justify="right", no_wrap=True)

    def cells(first: Side, second: Side, beyond: bool | None) -> list[str]:
        total = found.totals[0].total_s
        change = (second.total_s - first.total_s) / total if total else 0.0
        return [
            f"{first.total_s * per_second:.3f}",
            f"{second.total_s * per_second:.3f}",
            _ratio(first.total_s, second.total_s),
            _ratio(first.forward_s, second.forward_s),
            _ratio(first.backward_s, second.backward_s),
            f"{change:+.1%}" + ("*" if beyond else " "),
            _ratio(first.parameter_bytes, second.parameter_bytes),
            _ratio(first.saved_bytes, second.saved_bytes),
            _ratio(first.output_bytes, second.output_bytes),
        ]

    rows = _rows(found)
    for row in rows[:top]:
        shown = [_label(row), *cells(row.first, row.second, row.beyond_spread)]
        table.add_row(*(Text(one_line(cell)) for cell in shown))
    rest = rows[top:]
    if rest:
        sums = _sum([row.first for row in rest]), _sum([row.second for row in rest])
        table.add_row(*(Text(cell, "dim") for cell in [f"{len(rest)} others", *cells(*sums, None)]))
    table.add_row(*(Text(cell, "bold") for cell in ["total", *cells(*found.totals, None)]))
    return table


def _rows(found: Difference) -> list[Row]:
    """Matched and unmatched layers, sorted by how much each changes the total time."""
    gone = [Row((name,), (), "", side, NOTHING, None) for name, side in found.only_first]
    new = [Row((), (name,), "", NOTHING, side, None) for name, side in found.only_second]
    return sorted((*found.rows, *gone, *new), key=lambda row: -abs(row.change_s))


def _label(row: Row) -> str:
    if not row.first_names or not row.second_names:
        return f"{(row.first_names or row.second_names)[0]} ({'A' if row.first_names else 'B'} only)"
    if row.first_names == row.second_names:
        return row.first_names[0]
    return " = ".join(
        names[0] if len(names) == 1 else f"{len(names)} layers" for names in (row.first_names, row.second_names)
    )


def _sum(sides: Sequence[Side]) -> Side:
    return Side(
        sum(side.forward_s for side in sides),
        sum(side.backward_s for side in sides),
        sum(side.spread_s for side in sides),
        sum(side.parameter_bytes for side in sides),
        sum(side.saved_bytes for side in sides),
        sum(side.output_bytes for side in sides),
    )


def _ratio(first: float, second: float) -> str:
    if first == second:
        return "="
    if not first or not second:
        return "gone" if first else "new"
    ratio = second / first
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.3g}"


def _totals(found: Difference) -> list[str]:
    first, second = found.totals
    lines = []
    if any(row.beyond_spread is not None for row in found.rows):
        beyond = sum(bool(row.beyond_spread) for row in found.rows)
        lines.append(f"* beyond the spreads of both: {beyond} of {len(found.rows)} layers.")
    else:
        lines.append("No spreads to compare with: not both were measured.")
    each = " a sample" if found.per_sample else ""
    lines.append(
        f"Total: {show_time(first.total_s)} and {show_time(second.total_s)}{each}; weights "
        f"{show_size(first.parameter_bytes)} and {show_size(second.parameter_bytes)}."
    )
    peaks = found.first.peak_bytes, found.second.peak_bytes
    if all(peaks):
        lines.append(f"Peak memory: {show_size(peaks[0])} and {show_size(peaks[1])}.")
    return lines
