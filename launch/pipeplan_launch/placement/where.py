"""What a process says of where it is, and how that travels through the workers' common store. Torch-free."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

SERVER = "PIPEPLAN_SERVER"
"""Environment variable: the name of the server that a process is on, in place of what is found out. For containers
that are to count as one server, or are not."""


@dataclass(frozen=True)
class Where:
    """The place of one process."""

    machine: str
    """The same for all processes since one start of a system, in whatever containers."""
    host: str
    """Its name, which containers of one machine have of their own."""
    network: str
    """The same for processes of one machine that see the same network."""
    launcher: str = ""
    """Number of the launcher that started it, among those of the run; empty without one."""
    local: int = 0
    """Its number among those that this launcher started."""
    devices: int = 0
    """CUDA devices that it sees."""
    visible: str = ""
    """Which ones it is shown, where it is not shown all (CUDA_VISIBLE_DEVICES)."""
    cards: str = ""
    """The UUIDs of these devices, in their order, with a space between; empty where they are not known."""
    named: str = ""
    """What the user calls the server that it counts as (PIPEPLAN_SERVER); empty where that is found out."""

    @property
    def container(self) -> tuple[str, str, str]:
        """The same for all processes of one container, or of a machine outside of all, whatever they count as."""
        return self.machine, self.host, self.network

    @property
    def server(self) -> tuple[str, str, str]:
        """The same for all processes of one server."""
        return ("", self.named, "") if self.named else self.container

    @property
    def name(self) -> str:
        """Of the server, for people."""
        return self.named or self.host

    @property
    def path(self) -> tuple[str, tuple[str, str], str]:
        """From the outermost: the machine, the container on it, the launcher in that."""
        machine, host, network = self.server
        return machine, (host, network), self.launcher


def here(environment: Mapping[str, str], cards: Sequence[str] = ()) -> Where:
    """Where this process is; `cards` are the UUIDs of the CUDA devices that it sees, "" for one that has none."""
    machine = host = platform.node()
    network = ""
    with suppress(OSError):
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = str(os.stat("/proc/self/ns/net").st_ino)
    local = environment.get("LOCAL_RANK", "")
    return Where(
        machine=machine,
        host=host,
        network=network,
        launcher=environment.get("GROUP_RANK", ""),
        local=int(local) if local.isdecimal() else 0,
        devices=len(cards),
        visible=environment.get("CUDA_VISIBLE_DEVICES", ""),
        cards=" ".join(cards) if all(cards) else "",
        named=environment.get(SERVER, ""),
    )


def written(where: Where) -> str:
    """For the store."""
    return json.dumps(asdict(where))


def all_written(said: Sequence[str]) -> str:
    """What all processes wrote, by rank, in one: what those of one launcher have in common is there once."""
    table: dict[str, int] = {}
    rows = []
    for text in said:
        content = json.loads(text)
        local = content.pop("local")
        rows.append([table.setdefault(json.dumps(content), len(table)), local])
    return json.dumps({"common": [json.loads(text) for text in table], "processes": rows})


def all_read(text: str) -> tuple[Where, ...]:
    """What `all_written` wrote, by rank."""
    content = json.loads(text)
    return tuple(Where(**content["common"][number], local=local) for number, local in content["processes"])
