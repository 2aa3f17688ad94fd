"""How workers of one machine find each other: sockets that are in no folder, for their own user only."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from pipeplan_launch.links import Link, limit_waits

_HELLO = struct.Struct("<I")


class Door:
    """Where workers of the same machine knock, until all that are expected are in."""

    def __init__(self) -> None:
        """Raises `OSError` where the system has no such doors."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = os.stat("/proc/self/ns/net").st_ino
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("")  # Linux finds a free name, which is in no folder
        self._socket.listen(1024)
        name = self._socket.getsockname().decode().lstrip("\0")
        self.address = f"{boot}/{network}/{os.getuid()}/{name}"
        """The same machine, user and network are behind the same text before the last slash."""

    def link(self, rank: int, addresses: dict[int, str], timeout_s: float) -> dict[int, Link]:
        """Links to all the workers whose addresses are given, by rank: lower ranks knock at the doors of higher ones.

        Raises `OSError`.
        """
        connections: dict[int, socket.socket] = {}
        for peer in (one for one in addresses if one > rank):
            connections[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connections[peer].connect("\0" + addresses[peer].rpartition("/")[2])
            connections[peer].sendall(_HELLO.pack(rank))
        self._socket.settimeout(timeout_s)
        while len(connections) < len(addresses):
            connection, _ = self._socket.accept()
            limit_waits(connection, timeout_s)
            if _user_of(connection) == os.getuid():
                (peer,) = _HELLO.unpack(connection.recv(_HELLO.size))
                connections[peer] = connection
        return {peer: Link(connection, peer, timeout_s) for peer, connection in connections.items()}

    def close(self) -> None:
        """Nobody else is expected."""
        self._socket.close()


def near(one: str, other: str) -> bool:
    """Whether two addresses are of workers on the same machine that can reach each other's doors."""
    return one.rpartition("/")[0] == other.rpartition("/")[0] != ""


def _user_of(connection: socket.socket) -> int:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", packed)[1]
    return user
