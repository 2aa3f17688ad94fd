"""Draws the DAG of a profile in the terminal: one line for every chain and for every expensive layer.

The drawing resembles `git log --graph`: one line per node, and one lane per output that later nodes still read.

● a        a has an output that b and c read
├─● b      b reads a's output, and c will read it too
●─╯ c      c reads the outputs of a and b, as their last consumer
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from pipeplan.drawing.fold_chains import Chain, RepeatedBlock, fold_chains, most_expensive_layers, repeated_blocks
from pipeplan.profile_data.profile import Profile
from pipeplan.util.text import one_line

NODE_MARK, EXPENSIVE_NODE_MARK = "○", "●"
MAX_DRAWN_LANES = 16
"""Largest number of lanes that are drawn. Further lanes are not shown."""
BAR_WIDTH = 10
"""Characters of the longest bar."""
MIN_NAME_WIDTH = 12
"""Smallest number of characters for a name."""
MAX_LINES = 100
"""Number of lines above which equal blocks are drawn once."""


def dag_lines(profile: Profile, width: int) -> list[Text]:
    """Lines of at most `width` characters. The layers that take half of the time are marked and coloured.

    If there were too many lines, expensive layers get no separate lines, and only the first of several equal blocks is
    drawn.
    """
    hot = set(most_expensive_layers(profile))
    nodes = fold_chains(profile, hot)
    elided: list[RepeatedBlock] = []
    if len(nodes) > MAX_LINES:
        nodes = fold_chains(profile)
        elided = repeated_blocks(nodes)
    marked = [any(layer.name in hot for layer in chain.layers) for chain in nodes]
    drawn = graph_lanes([chain.reads for chain in nodes], marked)
    whole = profile.total_s or 1.0
    rows = [
        _Row(line, chain, chain.total_s / whole, mark) for line, chain, mark in zip(drawn, nodes, marked, strict=True)
    ]
    for repeat in reversed(elided):
        first = repeat.start + repeat.period
        share = sum(row.share for row in rows[first : repeat.end])
        last = one_line(nodes[repeat.end - 1].layers[-1].name)
        rows[first : repeat.end] = [_Row("⋮", f"{repeat.times - 1} times more, as far as {last}", share, False)]
    largest = max(row.share for row in rows) or 1.0
    return [_text(row, width, largest) for row in rows]


@dataclass(frozen=True)
class _Row:
    lanes: str
    label: Chain | str
    share: float
    marked: bool


def _text(row: _Row, width: int, largest: float) -> Text:
    room = max(MIN_NAME_WIDTH, width - BAR_WIDTH - 10 - len(row.lanes))
    name = row.label if isinstance(row.label, str) else _name(row.label, room)
    text = Text.assemble((f"{row.lanes} ", "" if row.marked else "dim"))
    text.append(_cut(name, room).ljust(room), "bold red" if row.marked else "")
    text.append(f" {row.share:6.1%} ")
    text.append("█" * round(BAR_WIDTH * row.share / largest), "red" if row.marked else "blue")
    text.rstrip()
    return text


def _name(chain: Chain, room: int) -> str:
    first, last = one_line(chain.layers[0].name), one_line(chain.layers[-1].name)
    if len(chain.layers) == 1:
        return _cut(first, room)
    count = f" ({len(chain.layers)} layers)"
    half = max(3, (room - len(count) - 3) // 2)
    over = max(0, half - len(last)), max(0, half - len(first))
    return f"{_cut(first, half + over[0])} … {_cut(last, half + over[1])}{count}"


def _cut(name: str, room: int) -> str:
    """A name in at most `room` characters.

    The beginning of a long name is cut off, because the end is more informative.
    """
    return name if len(name) <= room else "…" + name[len(name) - room + 1 :]


@dataclass
class _Lane:
    """The output of a node, drawn as a column until its last consumer."""

    producer: int
    left: int
    """Number of consumers that still follow."""


def graph_lanes(reads: Sequence[Sequence[int]], marked: Sequence[bool]) -> list[str]:
    """One line for every node of a DAG, which `reads` gives as the inputs of each node in a topological order.

    A lane is a column that begins at the node with an output and ends at the last node that reads it. At a node, `├`
    and `┤` are lanes that this and later nodes read, and `╰` and `╯` are lanes that end here. `┼` is a lane that the
    node reads, crossed by the line to another lane; `│` is a lane that the node does not read.
    """
    readers = Counter(source for sources in reads for source in sources)
    lanes: dict[int, _Lane] = {}  # by column
    lines = []
    ended = -1
    for number, sources in enumerate(reads):
        inputs = sorted(column for column, lane in lanes.items() if lane.producer in sources)
        for column in inputs:
            lanes[column].left -= 1
        ending = [column for column in inputs if not lanes[column].left]
        place = _place(lanes, inputs, ending, ended)
        lines.append(_line(lanes, place, inputs, EXPENSIVE_NODE_MARK if marked[number] else NODE_MARK))
        for column in ending:
            del lanes[column]
        if readers[number]:
            lanes[place] = _Lane(number, readers[number])
        ended = -1 if readers[number] else place
    return lines


def _place(lanes: Mapping[int, _Lane], inputs: list[int], ending: list[int], ended: int) -> int:
    """The column of a node: the leftmost lane that ends with it, else the first free column after its first input.

    The column of a lane that ended in the line above is not reused, because the node would seem to read that lane.
    """
    if ending:
        return ending[0]
    free = (column for column in itertools.count(inputs[0] + 1 if inputs else 0) if column not in lanes)
    return next(column for column in free if column != ended)


def _line(lanes: Mapping[int, _Lane], place: int, inputs: list[int], mark: str) -> str:
    left, right, width = min([place, *inputs]), max([place, *inputs]), max([place, *lanes]) + 1
    cells = []
    for column in range(min(width, MAX_DRAWN_LANES)):
        cells.append(_cell(lanes.get(column), column, place, inputs) if column != place else mark)
        cells.append("─" if left <= column < right else " ")
    if width > MAX_DRAWN_LANES:
        cells[-1] = f"{mark}…" if place >= MAX_DRAWN_LANES else "…"
    return "".join(cells).rstrip()


def _cell(lane: _Lane | None, column: int, place: int, inputs: list[int]) -> str:
    """The mark of a column without the node; `lane` is the lane in this column, None if there is none."""
    left, right = min([place, *inputs]), max([place, *inputs])
    if lane is None or column not in inputs:
        return "│" if lane is not None else "─" if left < column < right else " "
    if left < column < right:
        return "┼" if lane.left else "┴"
    if column < place:
        return "├" if lane.left else "╰"
    return "┤" if lane.left else "╯"
