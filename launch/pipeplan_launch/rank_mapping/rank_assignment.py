"""The assignment of processes to workers, servers and devices. Torch-free.

Every process derives the same assignment from the sizes of the plan's servers and the locations of all processes. In
the natural order process p is worker p. This order is kept unless the following rule divides the plan's servers less:

1. The plan's servers, the largest first, each take a real server with room for all their workers: the server with the
   least room, or among equals the server with most of their workers in the natural order.
2. The plan's servers that fit nowhere share the remaining processes, sorted by machine, container and launcher.
   Containers of a machine count as different servers, but they are next to each other.

On a server, workers are in the order of their processes.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeplan_launch.errors import LaunchError, listed
from pipeplan_launch.rank_mapping.host_identity import Location

Path = tuple[Hashable, ...]
"""Location of a process, outermost first: machine, container, launcher."""
MOST_NAMED = 4
"""Largest number of servers that a line names."""
SERVER_DEPTH = 2
"""Number of leading entries of a path that identify the server. One entry fewer identifies the machine."""


@dataclass(frozen=True)
class RankAssignment:
    """The rank assignment, the same in all processes.

    A server is a real machine or container, unless the text says "the plan's server".
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
        """Text that names the servers of a worker and its peers, for the end of an error message.

        Empty if all workers are on one server. Without `peers`, the text names the other servers.
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
        sharing = self._sharing_processes(process)
        if planned and names:
            return devices_by_name([planned[self.workers[one]] for one in sharing], names)[sharing.index(process)]
        return sharing.index(process) % max(1, self.locations[process].devices)

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
        """The processes that see the same devices as this one."""
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

    `sizes`: number of workers on each of the plan's servers. `paths`: location of each process. The number of processes
    must equal the number of workers.
    """
    assert sum(sizes) == len(paths)
    natural = tuple(range(len(paths)))
    if piece_counts(sizes, paths, natural)[0] == len(sizes):  # no server of the plan is divided
        return natural
    return min((natural, _packed(sizes, paths)), key=lambda workers: piece_counts(sizes, paths, workers))


def piece_counts(sizes: Sequence[int], paths: Sequence[Path], workers: Sequence[int]) -> tuple[int, ...]:
    """Counts to be minimised, in this order: pairs of a planned and a real server with workers in common, then the same
    pairs with machines, then with launchers.
    """
    planned = server_of_workers(sizes)
    depths = (SERVER_DEPTH, SERVER_DEPTH - 1, SERVER_DEPTH + 1)
    return tuple(
        len({(planned[worker], path[:depth]) for worker, path in zip(workers, paths, strict=True)}) for depth in depths
    )


def server_of_workers(sizes: Sequence[int]) -> list[int]:
    """The plan's server of each worker."""
    return [server for server, size in enumerate(sizes) for _ in range(size)]


def _packed(sizes: Sequence[int], paths: Sequence[Path]) -> tuple[int, ...]:
    """The worker that each process is if the plan's servers are packed into real servers."""
    natural, rooms = server_of_workers(sizes), dict[Path, list[int]]()
    for process in _in_order(paths):
        rooms.setdefault(paths[process][:SERVER_DEPTH], []).append(process)
    taken: dict[int, list[int]] = {}
    for server in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        fitting = [room for room in rooms.values() if len(room) >= sizes[server]]
        if fitting:
            room = min(fitting, key=lambda one: (len(one), -sum(natural[process] == server for process in one)))
            taken[server], room[:] = room[: sizes[server]], room[sizes[server] :]
    rest = itertools.chain.from_iterable(rooms.values())
    order = [taken.get(server) or list(itertools.islice(rest, size)) for server, size in enumerate(sizes)]
    worker_of = {process: worker for worker, process in enumerate(itertools.chain.from_iterable(order))}
    return tuple(worker_of[process] for process in range(len(paths)))


def _in_order(paths: Sequence[Path]) -> list[int]:
    """Processes by number, but processes of one location are next to each other."""
    first: dict[Path, int] = {}
    for process, path in enumerate(paths):
        for depth in range(1, len(path) + 1):
            first.setdefault(path[:depth], process)
    return sorted(
        range(len(paths)),
        key=lambda process: [first[paths[process][:depth]] for depth in range(1, len(paths[process]) + 1)],
    )
