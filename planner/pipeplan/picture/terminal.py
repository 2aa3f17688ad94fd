"""The DAG of a profile in the terminal: a line for every chain and for every expensive layer."""

from __future__ import annotations

from rich.text import Text

from pipeplan.picture.chains import Chain, chains, expensive
from pipeplan.picture.lanes import lanes
from pipeplan.profile import Profile
from pipeplan.text import one_line

BAR = 10
"""Characters of the longest bar."""
LEAST_NAME = 12


def picture(profile: Profile, width: int) -> list[Text]:
    """Lines of at most `width` characters. What takes half of the time is marked, and stands out in colour."""
    hot = expensive(profile)
    found = chains(profile, hot)
    whole = profile.total_s or 1.0
    shares = [chain.total_s / whole for chain in found]
    marked = [chain.layers[0].name in hot for chain in found]
    drawn = lanes([chain.reads for chain in found], marked)
    largest = max(shares) or 1.0
    room = max(LEAST_NAME, width - BAR - 9)
    lines = []
    for chain, share, mark, line in zip(found, shares, marked, drawn, strict=True):
        left = max(LEAST_NAME, room - len(line) - 1)
        text = Text(f"{line} ", "dim" if not mark else "")
        text.append(_name(chain, left).ljust(max(0, room - len(line) - 1)), "bold red" if mark else "")
        text.append(f" {share:6.1%} ")
        text.append("█" * round(BAR * share / largest), "red" if mark else "blue")
        text.rstrip()
        lines.append(text)
    return lines


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
