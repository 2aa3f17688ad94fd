"""Packs parts into bins of the same total size such that the parts are divided into as few pieces as possible.

Torch-free. A piece is a pair (part, bin) with something in common. If the parts and bins can be partitioned into at
most k sets, each with equal totals of parts and bins, the minimum is parts + bins - k pieces, since a set of p parts
and b bins needs p + b - 1. Finding the largest k is NP-hard (3-partition). So large inputs are reduced by heuristics:

- A part and a bin of one size form a set. This loses no optimum: if they were in two sets, the set of these two alone
  and the set of all others would be as many.
- Up to `EXACT_LIMIT` parts and bins, sets are found by dynamic programming over all subsets.
- Beyond that, bins that some parts fill exactly form sets with them, then parts that fill some bins exactly; the rest
  is one set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

EXACT_LIMIT = 12
"""Number of remaining parts and bins up to which the packing is exact: 2**12 subsets."""

Preference = Callable[[int, int], float]
"""Preference of a part for a bin, by their indices: among bins of one size, a part goes into the most preferred one."""

Amounts = list[dict[int, int]]
"""For each part, the amount of it in each bin."""


def pack_parts(parts: Sequence[int], bins: Sequence[int], liking: Preference = lambda part, bin: 0.0) -> Amounts:
    """Distribute parts over bins. `parts`, `bins`: their sizes, all above 0 and with the same sum."""
    assert sum(parts) == sum(bins)
    amounts: Amounts = [{} for _ in parts]
    left_parts, left_bins = list(range(len(parts))), list(range(len(bins)))
    for part, bin_ in _equal_pairs(parts, bins, liking):
        amounts[part][bin_] = parts[part]
        left_parts.remove(part)
        left_bins.remove(bin_)
    for some_parts, some_bins in _sets(parts, bins, left_parts, left_bins):
        _fill(amounts, {part: parts[part] for part in some_parts}, {bin_: bins[bin_] for bin_ in some_bins})
    return amounts


def _equal_pairs(parts: Sequence[int], bins: Sequence[int], liking: Preference) -> list[tuple[int, int]]:
    """Disjoint pairs of a part and a bin of one size, chosen greedily by preference."""
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
    """A partition of the remaining parts and bins into sets with equal totals."""
    found = []
    if len(left_parts) + len(left_bins) > EXACT_LIMIT:
        found += [(some, [bin_]) for bin_, some in _filling(bins, left_bins, parts, left_parts)]
        found += [([part], some) for part, some in _filling(parts, left_parts, bins, left_bins)]
    if len(left_parts) + len(left_bins) > EXACT_LIMIT:
        return [*found, (left_parts, left_bins)]
    return found + _most_sets(parts, bins, left_parts, left_bins)


def _filling(
    rooms: Sequence[int], left_rooms: list[int], sizes: Sequence[int], left: list[int]
) -> list[tuple[int, list[int]]]:
    """(room, items that fill it exactly) for each such room, largest first. Both are removed from the lists."""
    found = []
    for room in sorted(left_rooms, key=lambda one: (-rooms[one], one)):
        some = _exactly(rooms[room], sizes, left)
        if some is not None:
            found.append((room, some))
            left_rooms.remove(room)
            left[:] = [one for one in left if one not in some]
    return found


def _exactly(total: int, sizes: Sequence[int], left: Sequence[int]) -> list[int] | None:
    """The first subset of the remaining items that has this sum of sizes; None if there is none (subset sum)."""
    subsets: dict[int, list[int]] = {0: []}
    for one in left:
        for reached, some in list(subsets.items()):
            if reached + sizes[one] <= total:
                subsets.setdefault(reached + sizes[one], [*some, one])
        if total in subsets:
            return subsets[total]
    return None


def _most_sets(
    parts: Sequence[int], bins: Sequence[int], left_parts: list[int], left_bins: list[int]
) -> list[tuple[list[int], list[int]]]:
    """The largest number of sets, by dynamic programming over subsets of parts (positive) and bins (negative).

    The optimum is a chain of nested subsets in which the number of subsets with sum 0 is largest.
    """
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
    """Fill the bins of one set one after another, with the largest parts first, in at most parts + bins - 1 pieces."""
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
