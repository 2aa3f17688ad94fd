"""The assignment of processes to workers, servers and devices. Torch-free.

Every process derives the same assignment from the sizes of the plan's servers and the locations of all processes. The
rules, in order:

1. The assignment has few pieces (`pack_parts`). A piece is a pair of a planned server and a real server with workers in
   common. If every planned server fits onto a real server, each is one piece. Containers of a machine count as
   different servers, but if possible the pieces of one planned server are in containers of one machine and launcher.
2. In the natural order process p is worker p. If that order has equally few pieces, it is the assignment.
3. Otherwise, among real servers of one size, a planned server goes to the one with most of its workers in the natural
   order.

On a server, workers are in the order of their processes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeplan_launch.errors import LaunchError, listed
from pipeplan_launch.rank_mapping.host_identity import Location

Path = tuple[Hashable, ...]
"""Location of a process, outermost first: machine, container, launcher."""
MOST_NAMED = 4
"""Largest number of servers that a line names."""
SERVER_DEPTH = 2
"""Number of leading entries of a path that identify the server."""


@dataclass(frozen=True)
class RankAssignment:
    """The rank assignment, the same in all processes.

    Servers are real machines or containers, unless they are called the plan's.
    """

    sizes: tuple[int, ...]
    """Number of workers on each of the plan's servers."""
    locations: tuple[Location, ...]
    """Location of each process."""
    workers: tuple[int, ...]
    """The worker that each process is."""

    @staticmethod
    def of(sizes: Sequence[int], locations: Sequence[Location]) -> RankAssignment:
        """Derive the assignment from the sizes of the plan's servers and the locations of all processes."""
        return RankAssignment(
            tuple(sizes), tuple(locations), assign_workers(sizes, [location.path for location in locations])
        )

    @cached_property
    def servers(self) -> tuple[int, ...]:
        """Server of each worker. Servers are numbered in the order of their first workers."""
        numbers: dict[tuple[str, str, str], int] = {}
        return tuple(numbers.setdefault(location.server, len(numbers)) for location in self._by_worker)

    @cached_property
    def planned_servers(self) -> tuple[int, ...]:
        """The plan's server of each worker."""
        return tuple(server_of_workers(self.sizes))

    @property
    def is_one_server(self) -> bool:
        """Whether all workers are on one server."""
        return len(set(self.servers)) == 1

    @property
    def is_one_network(self) -> bool:
        """Whether all processes share one loopback interface. Containers that count as one server may not."""
        return len({(location.machine, location.network) for location in self.locations}) == 1

    @cached_property
    def divided_servers(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each server of the plan that is divided over several servers."""
        members = [
            [w for w in range(len(self.planned_servers)) if self.planned_servers[w] == server]
            for server in range(len(self.sizes))
        ]
        return tuple(tuple(one) for one in members if len({self.servers[worker] for worker in one}) > 1)

    def name(self, server: int) -> str:
        """Name of a server for messages, with a number if several servers have the same name."""
        names = dict(zip(self.servers, (location.name for location in self._by_worker), strict=True))
        same = [other for other in sorted(names) if names[other] == names[server]]
        return names[server] if len(same) == 1 else f"{names[server]} ({same.index(server) + 1})"

    def hosts_text(self, rank: int, peers: Sequence[int] = ()) -> str:
        """The servers of a worker and of its peers, as the end of a line that reports a fault between them.

        Empty if all workers are on one server. Without `peers`, it names the other servers.
        """
        if self.is_one_server:
            return ""
        own = self.servers[rank]
        others = [f"rank {peer} on {self.name(self.servers[peer])}" for peer in peers if self.servers[peer] != own]
        if peers and not others:
            return f" (on {self.name(own)})"
        if not others:
            names = [self.name(server) for server in sorted(set(self.servers) - {own})]
            others = [f"the others are on {listed(names[:MOST_NAMED])}{', …' if len(names) > MOST_NAMED else ''}"]
        return f" (rank {rank} is on {self.name(own)}, {listed(others)})"

    def device(self, process: int, planned: Sequence[str] = (), names: Sequence[str] = ()) -> int:
        """The number of a process's device among the devices that it sees.

        Processes that see the same devices take them in the order of their numbers. They share devices if there are too
        few. `planned`: the device name of each worker, if the plan names devices; each process then takes a matching
        device among `names`. Raises `LaunchError` if a device is missing.
        """
        if planned and names:
            sharing = self._sharing_processes(process)
            return devices_by_name([planned[self.workers[one]] for one in sharing], names)[sharing.index(process)]
        return self._sharing_processes(process).index(process) % max(1, self.locations[process].devices)

    def own_device_each(self) -> bool:
        """Whether every process has a device of its own."""
        if all(location.cards for location in self.locations):
            taken = {location.cards.split()[self.device(process)] for process, location in enumerate(self.locations)}
            return len(taken) == len(self.locations)
        return all(
            len(self._sharing_processes(process)) <= location.devices for process, location in enumerate(self.locations)
        )

    def started(self) -> str:
        """The number of processes by server name, as text: `4 on alpha and 2 on beta`."""
        counts = Counter(location.name for location in self.locations)
        return listed([f"{count} on {host}" for host, count in counts.items()])

    def _sharing_processes(self, process: int) -> list[int]:
        return self._processes_by_devices[_visible_devices(self.locations[process])]

    @cached_property
    def _processes_by_devices(self) -> dict[object, list[int]]:
        processes: dict[object, list[int]] = {}
        for process, location in enumerate(self.locations):
            processes.setdefault(_visible_devices(location), []).append(process)
        return processes

    @cached_property
    def _by_worker(self) -> tuple[Location, ...]:
        order = sorted(range(len(self.workers)), key=self.workers.__getitem__)
        return tuple(self.locations[process] for process in order)


def devices_by_name(planned: Sequence[str], names: Sequence[str]) -> list[int]:
    """The number of the device for each planned name: `RTX 4090` is in `NVIDIA GeForce RTX 4090`.

    If several names contain a planned name, the shortest is taken. Raises `LaunchError` if a device is missing.
    """
    free, found = dict(enumerate(names)), dict[int, int]()
    # `RTX 4060 Ti` chooses before `RTX 4060`, because both devices match the shorter name.
    for place in sorted(range(len(planned)), key=lambda one: -len(planned[one].split())):
        words = set(planned[place].lower().split())
        suiting = [number for number, name in free.items() if words <= set(name.lower().split())]
        if not suiting:
            raise LaunchError(
                f"the plan needs {listed(planned)} for its workers here, and torch finds {listed(names)}: name the "
                "devices in the cluster file as torch does, solve again, and show all of them in CUDA_VISIBLE_DEVICES"
            )
        found[place] = min(suiting, key=lambda number: len(free[number].split()))
        del free[found[place]]
    return [found[place] for place in range(len(planned))]


def _visible_devices(location: Location) -> object:
    """A key of the devices that a process sees. UUIDs are unique; device numbers are only unique in a container."""
    return location.cards or (location.container, location.visible)


def assign_workers(sizes: Sequence[int], paths: Sequence[Path]) -> tuple[int, ...]:
    """The worker that each process is.

    `sizes`: number of workers on each of the plan's servers. `paths`: location of each process; there must be as many
    processes as workers.
    """
    assert sum(sizes) == len(paths)
    natural = tuple(range(len(paths)))
    if piece_counts(sizes, paths, natural) == _least(sizes, paths):
        return natural
    # Dividing by machine first is better if containers share a machine. Dividing by container at once always has the
    # fewest pieces.
    candidates = [natural, *(_Derivation(sizes, paths, levels).workers() for levels in _levels(paths))]
    return min(candidates, key=lambda workers: piece_counts(sizes, paths, workers))


def piece_counts(sizes: Sequence[int], paths: Sequence[Path], workers: Sequence[int]) -> tuple[int, ...]:
    """The number of pieces of an assignment by server, by machine and by launcher, to be minimised in this order."""
    server = server_of_workers(sizes)
    return tuple(
        len({(server[worker], path[:depth]) for worker, path in zip(workers, paths, strict=True)})
        for depth in _depths(paths)
    )


def _least(sizes: Sequence[int], paths: Sequence[Path]) -> tuple[int, ...]:
    """A lower bound of `piece_counts`: every server of the plan, and every location, has at least one piece."""
    return tuple(max(len(sizes), len({path[:depth] for path in paths})) for depth in _depths(paths))


def _depths(paths: Sequence[Path]) -> list[int]:
    return [SERVER_DEPTH, *(depth for depth in range(1, len(paths[0]) + 1) if depth != SERVER_DEPTH)]


def server_of_workers(sizes: Sequence[int]) -> list[int]:
    """The plan's server of each worker."""
    return [server for server, size in enumerate(sizes) for _ in range(size)]


def _levels(paths: Sequence[Path]) -> tuple[tuple[int, ...], ...]:
    """The two ways to divide servers: by prefixes of paths from the server on, or from the machine on."""
    every = tuple(range(1, len(paths[0]) + 1))
    return every[SERVER_DEPTH - 1 :], every


class _Derivation:
    def __init__(self, sizes: Sequence[int], paths: Sequence[Path], levels: Sequence[int]) -> None:
        self._sizes, self._paths, self._levels = sizes, paths, levels
        self._natural = server_of_workers(sizes)
        self._processes: list[list[int]] = [[] for _ in sizes]
        """The processes of each server of the plan, filled by `_place`."""

    def workers(self) -> tuple[int, ...]:
        """The worker that each process is."""
        self._place(dict(enumerate(self._sizes)), list(range(len(self._paths))), 0)
        workers = [0] * len(self._paths)
        for first, processes in zip(itertools.accumulate(self._sizes, initial=0), self._processes, strict=False):
            for worker, process in enumerate(self._in_order(processes), first):
                workers[process] = worker
        return tuple(workers)

    def _place(self, amounts: dict[int, int], processes: list[int], level: int) -> None:
        """Distribute these processes, which share the beginning of a path, over servers. `amounts`: how many each
        server gets.
        """
        if len(amounts) == 1 or level == len(self._levels):
            rest = iter(processes)
            for server, amount in sorted(amounts.items()):
                self._processes[server] += itertools.islice(rest, amount)
            return
        inside: dict[Hashable, list[int]] = {}
        for process in processes:
            inside.setdefault(self._paths[process][: self._levels[level]], []).append(process)
        groups, servers = list(inside.values()), sorted(amounts)
        # A server prefers groups that are not divided, and then groups that hold more of its workers in the natural
        # order.
        natural = [Counter(self._natural[process] for process in group) for group in groups]
        pieces = [len({self._paths[process][:SERVER_DEPTH] for process in group}) for group in groups]
        packed = pack_parts(
            [amounts[server] for server in servers],
            [len(group) for group in groups],
            lambda part, bin_: natural[bin_][servers[part]] - len(self._paths) * pieces[bin_],
        )
        for number, group in enumerate(groups):
            shares = {server: one[number] for server, one in zip(servers, packed, strict=True) if number in one}
            self._place(shares, group, level + 1)

    def _in_order(self, processes: list[int]) -> list[int]:
        """Processes by number, but processes of one location are next to each other."""
        first: dict[Path, int] = {}
        for process in sorted(processes):
            for depth in range(len(self._paths[process]) + 1):
                first.setdefault(self._paths[process][:depth], process)

        def key(process: int) -> tuple[int, ...]:
            path = self._paths[process]
            return (*(first[path[:depth]] for depth in range(1, len(path) + 1)), process)

        return sorted(processes, key=key)


# Packs parts into bins with the same total size, so that the parts are divided into few pieces.
#
# A piece is a pair (part, bin) with something in common. A set of p parts and b bins of equal totals needs p + b - 1
# pieces, so many small sets are best. Finding most of them is NP-hard (3-partition). These rules found the optimum in
# all but 11 of 3,000 random cases: a part and a bin of one size form a set; then a bin and the parts that fill it
# exactly; then a part and the bins that it fills exactly; the rest is one set.

Preference = Callable[[int, int], float]
"""Preference of a part for a bin, by their indices: among bins of one size, a part goes into the most preferred bin."""

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
    found = [(some, [bin_]) for bin_, some in _filling(bins, left_bins, parts, left_parts)]
    found += [([part], some) for part, some in _filling(parts, left_parts, bins, left_bins)]
    return [*found, (left_parts, left_bins)]


def _filling(
    rooms: Sequence[int], left_rooms: list[int], sizes: Sequence[int], left: list[int]
) -> list[tuple[int, list[int]]]:
    """(room, items that fill it exactly) for each room that can be filled, largest first. Both are removed from the
    lists.
    """
    found = []
    for room in sorted(left_rooms, key=lambda one: (-rooms[one], one)):
        some = _exactly(rooms[room], sizes, left)
        if some is not None:
            found.append((room, some))
            left_rooms.remove(room)
            left[:] = [one for one in left if one not in some]
    return found


def _exactly(total: int, sizes: Sequence[int], left: Sequence[int]) -> list[int] | None:
    """The first subset of the remaining items whose sizes have this sum; None if there is none (subset sum)."""
    subsets: dict[int, list[int]] = {0: []}
    for one in left:
        for reached, some in list(subsets.items()):
            if reached + sizes[one] <= total:
                subsets.setdefault(reached + sizes[one], [*some, one])
        if total in subsets:
            return subsets[total]
    return None


def _fill(amounts: Amounts, parts: dict[int, int], bins: dict[int, int]) -> None:
    """Fill the bins of a set in turn, with the largest parts first, in at most parts + bins - 1 pieces."""
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
