"""Which worker of the plan each process is, from the sizes of the plan's servers and the places of processes.

Torch-free, and the same in every process: all know the same places. What is derived

1. has as few pieces as can be found: pairs of a server of the plan and a real one that have workers in common. Where
   every server of the plan fits onto one, that is one piece each. Containers of a machine are told apart, but pieces of
   one server go to containers of one machine, and of one launcher, where they can;
2. changes nothing where the natural order, by which process p is worker p, has as few pieces;
3. else leaves servers where the natural order has most of their workers, among real ones of the same size.

On a server, workers are in the order of their processes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence

from pipeplan_launch.placement.packing import pack

Path = tuple[Hashable, ...]
"""Where a process is, from the outermost: machine, container, launcher."""

SERVER_DEPTH = 2
"""So many entries of a path say on which server it is."""


def derive(sizes: Sequence[int], paths: Sequence[Path]) -> tuple[int, ...]:
    """The worker that every process is, by its number. `sizes`: workers on each of the plan's servers.

    There must be as many processes as workers.
    """
    assert sum(sizes) == len(paths)
    natural = tuple(range(len(paths)))
    if cost(sizes, paths, natural) == _least(sizes, paths):
        return natural
    # By machine first is better where containers share one; by container at once is sure to have the fewest pieces.
    ways = [natural, *(_Derivation(sizes, paths, levels).workers() for levels in _levels(paths))]
    return min(ways, key=lambda workers: cost(sizes, paths, workers))


def cost(sizes: Sequence[int], paths: Sequence[Path], workers: Sequence[int]) -> tuple[int, ...]:
    """What is as small as can be, the first most of all: pieces by server, by machine, by launcher."""
    server = server_of_workers(sizes)
    return tuple(
        len({(server[worker], path[:depth]) for worker, path in zip(workers, paths, strict=True)})
        for depth in _depths(paths)
    )


def _least(sizes: Sequence[int], paths: Sequence[Path]) -> tuple[int, ...]:
    """No cost is below this: a piece for every server of the plan, and for every place."""
    return tuple(max(len(sizes), len({path[:depth] for path in paths})) for depth in _depths(paths))


def _depths(paths: Sequence[Path]) -> list[int]:
    return [SERVER_DEPTH, *(depth for depth in range(1, len(paths[0]) + 1) if depth != SERVER_DEPTH)]


def server_of_workers(sizes: Sequence[int]) -> list[int]:
    """The plan's server of every worker."""
    return [server for server, size in enumerate(sizes) for _ in range(size)]


def _levels(paths: Sequence[Path]) -> tuple[tuple[int, ...], ...]:
    """Lengths of prefixes of a path, by which servers are divided one after another."""
    every = tuple(range(1, len(paths[0]) + 1))
    return every[SERVER_DEPTH - 1 :], every


class _Derivation:
    def __init__(self, sizes: Sequence[int], paths: Sequence[Path], levels: Sequence[int]) -> None:
        self._sizes, self._paths, self._levels = sizes, paths, levels
        self._natural = server_of_workers(sizes)
        self._processes: list[list[int]] = [[] for _ in sizes]
        """Of every server, in the end."""

    def workers(self) -> tuple[int, ...]:
        """By process."""
        self._place(dict(enumerate(self._sizes)), list(range(len(self._paths))), 0)
        found = [0] * len(self._paths)
        for first, processes in zip(itertools.accumulate(self._sizes, initial=0), self._processes, strict=False):
            for worker, process in enumerate(self._in_order(processes), first):
                found[process] = worker
        return tuple(found)

    def _place(self, amounts: dict[int, int], processes: list[int], level: int) -> None:
        """Give so many of these processes, which share a path so far, to each server."""
        if len(amounts) == 1 or level == len(self._levels):
            rest = iter(processes)
            for server, amount in sorted(amounts.items()):
                self._processes[server] += itertools.islice(rest, amount)
            return
        inside: dict[Hashable, list[int]] = {}
        for process in processes:
            inside.setdefault(self._paths[process][: self._levels[level]], []).append(process)
        groups, servers = list(inside.values()), sorted(amounts)
        # What a server keeps by staying there; and first of all, a place that is not itself in several parts.
        keeps = [Counter(self._natural[process] for process in group) for group in groups]
        spread = [len({self._paths[process][:SERVER_DEPTH] for process in group}) for group in groups]
        packed = pack(
            [amounts[server] for server in servers],
            [len(group) for group in groups],
            lambda part, bin_: keeps[bin_][servers[part]] - len(self._paths) * spread[bin_],
        )
        for number, group in enumerate(groups):
            shares = {server: one[number] for server, one in zip(servers, packed, strict=True) if number in one}
            self._place(shares, group, level + 1)

    def _in_order(self, processes: list[int]) -> list[int]:
        """Those of one place next to each other, else by number."""
        first: dict[Path, int] = {}
        for process in sorted(processes):
            for depth in range(len(self._paths[process]) + 1):
                first.setdefault(self._paths[process][:depth], process)

        def key(process: int) -> tuple[int, ...]:
            path = self._paths[process]
            return (*(first[path[:depth]] for depth in range(1, len(path) + 1)), process)

        return sorted(processes, key=key)
