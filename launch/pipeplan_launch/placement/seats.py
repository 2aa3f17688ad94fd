"""The assignment of processes to workers, servers and devices, which every process derives from all locations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeplan_launch.errors import listed
from pipeplan_launch.placement.derive import derive, server_of_workers
from pipeplan_launch.placement.where import Where


@dataclass(frozen=True)
class Seats:
    """The rank assignment, the same in all processes.

    Servers are real ones, unless they are called the plan's: machines, or containers that are told apart.
    """

    sizes: tuple[int, ...]
    """Number of workers on each of the plan's servers."""
    wheres: tuple[Where, ...]
    """Location of each process."""
    workers: tuple[int, ...]
    """The worker that each process is."""

    @staticmethod
    def of(sizes: Sequence[int], wheres: Sequence[Where]) -> Seats:
        """Derive the assignment from the sizes of the plan's servers and the locations of all processes."""
        return Seats(tuple(sizes), tuple(wheres), derive(sizes, [where.path for where in wheres]))

    @cached_property
    def servers(self) -> tuple[int, ...]:
        """Server of each worker. Servers are numbered in the order of their first workers."""
        numbers: dict[tuple[str, str, str], int] = {}
        return tuple(numbers.setdefault(where.server, len(numbers)) for where in self._by_worker)

    @cached_property
    def meant(self) -> tuple[int, ...]:
        """The plan's server of each worker."""
        return tuple(server_of_workers(self.sizes))

    @property
    def is_one_server(self) -> bool:
        """Whether all workers are on one server."""
        return len(set(self.servers)) == 1

    @property
    def is_one_network(self) -> bool:
        """Whether all processes share one loopback interface. Containers that count as one server may not."""
        return len({(where.machine, where.network) for where in self.wheres}) == 1

    @cached_property
    def apart(self) -> tuple[tuple[int, ...], ...]:
        """The workers of each server of the plan that is divided over several servers."""
        members = [[w for w in range(len(self.meant)) if self.meant[w] == server] for server in range(len(self.sizes))]
        return tuple(tuple(one) for one in members if len({self.servers[worker] for worker in one}) > 1)

    def name(self, server: int) -> str:
        """Name of a server for messages, with a number where several servers have the same name."""
        names = dict(zip(self.servers, (where.name for where in self._by_worker), strict=True))
        same = [other for other in sorted(names) if names[other] == names[server]]
        return names[server] if len(same) == 1 else f"{names[server]} ({same.index(server) + 1})"

    def device(self, process: int) -> int:
        """The number of a process's device among those that it sees.

        Processes that see the same devices take them in the order of their numbers. They share devices if there are
        too few.
        """
        return self._sharing_processes(process).index(process) % max(1, self.wheres[process].devices)

    def own_device_each(self) -> bool:
        """Whether every process has a device of its own."""
        if all(where.cards for where in self.wheres):
            taken = {where.cards.split()[self.device(process)] for process, where in enumerate(self.wheres)}
            return len(taken) == len(self.wheres)
        return all(len(self._sharing_processes(process)) <= where.devices for process, where in enumerate(self.wheres))

    def started(self) -> str:
        """The number of processes by server name, as text: `4 on alpha and 2 on beta`."""
        counts = Counter(where.name for where in self.wheres)
        return listed([f"{count} on {host}" for host, count in counts.items()])

    def _sharing_processes(self, process: int) -> list[int]:
        return self._processes_by_devices[_visible_devices(self.wheres[process])]

    @cached_property
    def _processes_by_devices(self) -> dict[object, list[int]]:
        processes: dict[object, list[int]] = {}
        for process, where in enumerate(self.wheres):
            processes.setdefault(_visible_devices(where), []).append(process)
        return processes

    @cached_property
    def _by_worker(self) -> tuple[Where, ...]:
        order = sorted(range(len(self.workers)), key=self.workers.__getitem__)
        return tuple(self.wheres[process] for process in order)


def _visible_devices(where: Where) -> object:
    """A key of the devices that a process sees. UUIDs are unique; device numbers are only unique in a container."""
    return where.cards or (where.container, where.visible)
