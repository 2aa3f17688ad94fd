"""What every process knows once all have said where they are: who is which worker, on which server and device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeplan_launch.placement.derive import derive, server_of_workers
from pipeplan_launch.placement.where import Where


@dataclass(frozen=True)
class Seats:
    """The same in all processes. A server here is a real one: a machine, or a container that is told apart from it."""

    sizes: tuple[int, ...]
    """Workers on each of the plan's servers."""
    wheres: tuple[Where, ...]
    """By process."""
    workers: tuple[int, ...]
    """The worker that every process is."""

    @staticmethod
    def of(sizes: Sequence[int], wheres: Sequence[Where]) -> Seats:
        """Derived from the sizes of the plan's servers, and from where all processes are."""
        return Seats(tuple(sizes), tuple(wheres), derive(sizes, [where.path for where in wheres]))

    @cached_property
    def servers(self) -> tuple[int, ...]:
        """The server that every worker is on, by a number: 0 for that of worker 0, and so on as they come."""
        found: dict[tuple[str, str, str], int] = {}
        return tuple(found.setdefault(where.server, len(found)) for where in self._by_worker)

    @cached_property
    def meant(self) -> tuple[int, ...]:
        """The plan's server of every worker."""
        return tuple(server_of_workers(self.sizes))

    @property
    def is_one_server(self) -> bool:
        """Whether all workers are on one."""
        return len(set(self.servers)) == 1

    @property
    def is_one_network(self) -> bool:
        """Whether all see one network of one machine, and so one loopback interface: containers of a server may not."""
        return len({(where.machine, where.network) for where in self.wheres}) == 1

    @cached_property
    def apart(self) -> tuple[tuple[int, ...], ...]:
        """Workers of each server of the plan that is on several."""
        members = [[w for w in range(len(self.meant)) if self.meant[w] == server] for server in range(len(self.sizes))]
        return tuple(tuple(one) for one in members if len({self.servers[worker] for worker in one}) > 1)

    def name(self, server: int) -> str:
        """Of a server, for people; with its number where names do not tell them apart."""
        hosts = dict(zip(self.servers, (where.name for where in self._by_worker), strict=True))
        same = [other for other in sorted(hosts) if hosts[other] == hosts[server]]
        return hosts[server] if len(same) == 1 else f"{hosts[server]} ({same.index(server) + 1})"

    def device(self, process: int) -> int:
        """Which of the devices that a process sees is its own, as far as there are enough: those who see the same
        ones on a server take them in the order of their numbers."""
        return self._fellows(process).index(process) % max(1, self.wheres[process].devices)

    def own_device_each(self) -> bool:
        """Whether no two processes share a device."""
        if all(where.cards for where in self.wheres):
            taken = {where.cards.split()[self.device(process)] for process, where in enumerate(self.wheres)}
            return len(taken) == len(self.wheres)
        return all(len(self._fellows(process)) <= where.devices for process, where in enumerate(self.wheres))

    def started(self) -> str:
        """How many processes run where, for people: `4 on alpha and 2 on beta`."""
        counts = Counter(where.name for where in self.wheres)
        parts = [f"{count} on {host}" for host, count in counts.items()]
        return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)

    def _fellows(self, process: int) -> list[int]:
        return self._sharing[_view(self.wheres[process])]

    @cached_property
    def _sharing(self) -> dict[object, list[int]]:
        found: dict[object, list[int]] = {}
        for process, where in enumerate(self.wheres):
            found.setdefault(_view(where), []).append(process)
        return found

    @cached_property
    def _by_worker(self) -> tuple[Where, ...]:
        order = sorted(range(len(self.workers)), key=self.workers.__getitem__)
        return tuple(self.wheres[process] for process in order)


def _view(where: Where) -> object:
    """The same for processes that see the same devices: no two have a UUID, and all containers have numbers from 0."""
    return where.cards or (where.container, where.visible)
