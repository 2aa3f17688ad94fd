"""Connections between workers of one machine, through abstract Unix sockets that only their own user may use."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from pipeplan_launch.links import Link, limit_waits

_HELLO = struct.Struct("<I")


class Door:
    """A listening socket to which other workers of the machine connect."""

    def __init__(self) -> None:
        """Raises `OSError` where the system has no abstract Unix sockets."""
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        network = os.stat("/proc/self/ns/net").st_ino
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind("")  # Linux picks a free abstract name, which is not in the file system
        self._socket.listen(1024)
        name = self._socket.getsockname().decode().lstrip("\0")
        self.address = f"{boot}/{network}/{os.getuid()}/{name}"
        """`BOOT/NETWORK/USER/NAME`: workers that can connect to each other have the same text before the last slash."""

    def link(self, rank: int, addresses: dict[int, str], timeout_s: float) -> dict[int, Link]:
        """Links to the workers at these addresses, by rank. Lower ranks connect to higher ones. Raises `OSError`."""
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
        """Stop listening."""
        self._socket.close()


def near(one: str, other: str) -> bool:
    """Whether the workers at two addresses are on one machine and can connect to each other."""
    return one.rpartition("/")[0] == other.rpartition("/")[0] != ""


def _user_of(connection: socket.socket) -> int:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", packed)[1]
    return user
