"""The location of a process, and its form in the workers' common store. Torch-free."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

SERVER_VARIABLE = "PIPEPLAN_SERVER"
"""Environment variable: name of a process's server, in place of the detected server. Containers with the same name
count as one server."""


@dataclass(frozen=True)
class Location:
    """The location of one process."""

    machine: str
    """Id of the machine's current boot, the same in all its containers."""
    host: str
    """Host name. Each container of a machine has its own host name."""
    network: str
    """Id of the network namespace, the same for processes of one machine that see the same network."""
    launcher: str = ""
    """Number, within the run, of the launcher that started the process; empty without a launcher."""
    devices: int = 0
    """Number of CUDA devices that the process sees."""
    visible: str = ""
    """CUDA_VISIBLE_DEVICES; empty if it is not set."""
    cards: str = ""
    """UUIDs of the visible devices, in order and separated by spaces; empty if they are not known."""
    named: str = ""
    """The user's name for the server (PIPEPLAN_SERVER); empty if it is not set."""

    @property
    def container(self) -> tuple[str, str, str]:
        """Id of the container (or of the machine, outside containers), regardless of PIPEPLAN_SERVER."""
        return self.machine, self.host, self.network

    @property
    def server(self) -> tuple[str, str, str]:
        """Id of the server, the same for all processes on it."""
        return ("", self.named, "") if self.named else self.container

    @property
    def name(self) -> str:
        """Name of the server for messages."""
        return self.named or self.host

    @property
    def path(self) -> tuple[str, tuple[str, str], str]:
        """The nested locations, outermost first: machine, container, launcher."""
        machine, host, network = self.server
        return machine, (host, network), self.launcher


def own_location(environment: Mapping[str, str], cards: Sequence[str] = ()) -> Location:
    """The location of this process. `cards`: UUIDs of the CUDA devices that it sees, "" for a device without one."""
    machine, network = machine_and_network()
    return Location(
        machine=machine,
        host=platform.node(),
        network=network,
        launcher=environment.get("GROUP_RANK", ""),
        devices=len(cards),
        visible=environment.get("CUDA_VISIBLE_DEVICES", ""),
        cards=" ".join(cards) if all(cards) else "",
        named=environment.get(SERVER_VARIABLE, ""),
    )


def machine_and_network() -> tuple[str, str]:
    """(id of the machine's current boot, id of this process's network namespace).

    Without Linux's /proc: the host name and "".
    """
    machine, network = platform.node(), ""
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = str(os.stat("/proc/self/ns/net").st_ino)
    return machine, network


def location_json(where: Location) -> str:
    """A location as JSON, for the store."""
    return msgspec.json.encode(where).decode()


def locations_json(locations: Sequence[str]) -> str:
    """The JSON locations of all processes, by rank, as one JSON text."""
    return f"[{','.join(locations)}]"


def read_locations(text: bytes) -> tuple[Location, ...]:
    """The locations of all processes, by rank, from the text of `locations_json`."""
    return msgspec.json.decode(text, type=tuple[Location, ...])
