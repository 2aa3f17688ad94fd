"""The DAG of a profile in the terminal: a line for every chain and for every expensive layer."""

from __future__ import annotations

from dataclasses import dataclass

from rich.text import Text

from pipeplan.picture.chains import Chain, chains, expensive
from pipeplan.picture.lanes import lanes
from pipeplan.picture.repeats import Repeat, repeats
from pipeplan.profile_data import Profile
from pipeplan.text import one_line

BAR = 10
"""Characters of the longest bar."""
LEAST_NAME = 12
MANY = 100
"""Lines from which on blocks that are alike are drawn once."""


def picture(profile: Profile, width: int) -> list[Text]:
    """Lines of at most `width` characters. What takes half of the time is marked, and stands out in colour.

    Where that would be very many lines, the expensive layers are not drawn apart, and of blocks that are alike only the
    first is drawn.
    """
    hot = set(expensive(profile))
    found = chains(profile, hot)
    elided: list[Repeat] = []
    if len(found) > MANY:
        found = chains(profile)
        elided = repeats(found)
    marked = [any(layer.name in hot for layer in chain.layers) for chain in found]
    drawn = lanes([chain.reads for chain in found], marked)
    whole = profile.total_s or 1.0
    rows = [
        _Row(line, chain, chain.total_s / whole, mark) for line, chain, mark in zip(drawn, found, marked, strict=True)
    ]
    for one in reversed(elided):
        first = one.start + one.period
        share = sum(row.share for row in rows[first : one.end])
        last = one_line(found[one.end - 1].layers[-1].name)
        rows[first : one.end] = [_Row("⋮", f"{one.times - 1} times more, as far as {last}", share, False)]
    largest = max(row.share for row in rows) or 1.0
    return [_text(row, width, largest) for row in rows]


@dataclass(frozen=True)
class _Row:
    lanes: str
    what: Chain | str
    share: float
    marked: bool


def _text(row: _Row, width: int, largest: float) -> Text:
    room = max(LEAST_NAME, width - BAR - 10 - len(row.lanes))
    name = row.what if isinstance(row.what, str) else _name(row.what, room)
    text = Text.assemble((f"{row.lanes} ", "" if row.marked else "dim"))
    text.append(_cut(name, room).ljust(room), "bold red" if row.marked else "")
    text.append(f" {row.share:6.1%} ")
    text.append("█" * round(BAR * row.share / largest), "red" if row.marked else "blue")
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
    """A name in `room` characters: its end tells more than its beginning."""
    return name if len(name) <= room else "…" + name[len(name) - room + 1 :]
