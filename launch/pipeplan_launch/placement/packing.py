"""Parts that should stay whole, onto bins of the same total size, so that as few pieces result as can be. Torch-free.

The number of pieces is the number of pairs (part, bin) that have something in common. Where parts and bins fall into
k sets of equal totals, and no more, there are (parts + bins - k) pieces: a set of p parts and b bins needs p + b - 1.
To find the largest k is NP-hard (3-partition), so what is large is solved by rules and only the rest exactly:

- A part and a bin of one size are put together. No best solution is lost by that: were they in two sets, the one of
  these two alone and the one of all others would be as many.
- Up to `EXACT` parts and bins, sets are found by dynamic programming over all subsets.
- Beyond, bins that some parts fill exactly are looked for, then parts that some bins hold exactly, the rest is one set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

EXACT = 12
"""Parts and bins left, at most, that are solved exactly: 2**12 subsets."""

Liking = Callable[[int, int], float]
"""How well a part would be in a bin, by index: among bins of one size, the part goes where it is liked best."""

Amounts = list[dict[int, int]]
"""For every part, how much of it each bin has."""


def pack(parts: Sequence[int], bins: Sequence[int], liking: Liking = lambda part, bin: 0.0) -> Amounts:
    """Distribute parts of these sizes over bins of these, all of them above 0 and of the same sum."""
    assert sum(parts) == sum(bins)
    amounts: Amounts = [{} for _ in parts]
    left_parts, left_bins = list(range(len(parts))), list(range(len(bins)))
    for part, bin_ in _alike(parts, bins, liking):
        amounts[part][bin_] = parts[part]
        left_parts.remove(part)
        left_bins.remove(bin_)
    for some_parts, some_bins in _sets(parts, bins, left_parts, left_bins):
        _fill(amounts, {part: parts[part] for part in some_parts}, {bin_: bins[bin_] for bin_ in some_bins})
    return amounts


def _alike(parts: Sequence[int], bins: Sequence[int], liking: Liking) -> list[tuple[int, int]]:
    """Pairs of one size, those that like each other best first."""
    pairs = [(part, bin_) for part, size in enumerate(parts) for bin_, room in enumerate(bins) if size == room]
    pairs.sort(key=lambda pair: (-liking(*pair), pair))
    chosen: list[tuple[int, int]] = []
    taken_parts: set[int] = set()
    taken_bins: set[int] = set()
    for part, bin_ in pairs:
        if part not in taken_parts and bin_ not in taken_bins:
            chosen.append((part, bin_))
            taken_parts.add(part)
            taken_bins.add(bin_)
    return chosen


def _sets(
    parts: Sequence[int], bins: Sequence[int], left_parts: list[int], left_bins: list[int]
) -> list[tuple[list[int], list[int]]]:
    """Sets of parts and bins with equal totals, as many as are found."""
    found = []
    if len(left_parts) + len(left_bins) > EXACT:
        found += [(some, [bin_]) for bin_, some in _filling(bins, left_bins, parts, left_parts)]
        found += [([part], some) for part, some in _filling(parts, left_parts, bins, left_bins)]
    if len(left_parts) + len(left_bins) > EXACT:
        return [*found, (left_parts, left_bins)]
    return found + _most_sets(parts, bins, left_parts, left_bins)


def _filling(
    rooms: Sequence[int], left_rooms: list[int], sizes: Sequence[int], left: list[int]
) -> list[tuple[int, list[int]]]:
    """Rooms that some of what is left fills exactly, largest first, and by what; both are taken from what is left."""
    found = []
    for room in sorted(left_rooms, key=lambda one: (-rooms[one], one)):
        some = _exactly(rooms[room], sizes, left)
        if some is not None:
            found.append((room, some))
            left_rooms.remove(room)
            left[:] = [one for one in left if one not in some]
    return found


def _exactly(total: int, sizes: Sequence[int], left: Sequence[int]) -> list[int] | None:
    """Some of what is left with this sum of sizes, the first that there are; None if there are none."""
    ways: dict[int, list[int]] = {0: []}
    for one in left:
        for reached, some in list(ways.items()):
            if reached + sizes[one] <= total:
                ways.setdefault(reached + sizes[one], [*some, one])
        if total in ways:
            return ways[total]
    return None


def _most_sets(
    parts: Sequence[int], bins: Sequence[int], left_parts: list[int], left_bins: list[int]
) -> list[tuple[list[int], list[int]]]:
    """As many as there are: over subsets of parts (counted positive) and bins (negative), those of sum 0 on a chain."""
    items = [(parts[part], part, True) for part in left_parts] + [(-bins[bin_], bin_, False) for bin_ in left_bins]
    if not items:
        return []
    sums, most, last = [0], [0], [-1]
    for subset in range(1, 1 << len(items)):
        low = (subset & -subset).bit_length() - 1
        sums.append(sums[subset & (subset - 1)] + items[low][0])
        best, at = -1, -1
        for number in range(len(items)):
            if subset >> number & 1 and most[subset ^ (1 << number)] > best:
                best, at = most[subset ^ (1 << number)], number
        most.append(best + (sums[subset] == 0))
        last.append(at)
    found: list[tuple[list[int], list[int]]] = []
    subset = len(sums) - 1
    while subset:
        if sums[subset] == 0:
            found.append(([], []))
        _, index, is_part = items[last[subset]]
        found[-1][0 if is_part else 1].append(index)
        subset ^= 1 << last[subset]
    return [(sorted(some_parts), sorted(some_bins)) for some_parts, some_bins in reversed(found)]


def _fill(amounts: Amounts, parts: dict[int, int], bins: dict[int, int]) -> None:
    """One after the other, the largest parts first, so that these are what is divided: parts + bins - 1 pieces."""
    order = sorted(bins)
    for part in sorted(parts, key=lambda one: (-parts[one], one)):
        left = parts[part]
        while left:
            piece = min(left, bins[order[0]])
            amounts[part][order[0]] = piece
            left -= piece
            bins[order[0]] -= piece
            if not bins[order[0]]:
                order.pop(0)
