"""Connections whose peers have not yet shown that they know the launch's secret. Torch-free.

A peer that knows the secret answers within a round trip, so few connections are enough and each lasts a few seconds at
most. A peer that does not know it can open any number of connections. When there is no room, one connection of the
address with the most connections is closed at random. So a flood from one address closes its own connections, and a
server that shares this address still gets through after a few attempts.
"""

from __future__ import annotations

import ipaddress
import random
import resource
from collections import Counter
from typing import Generic, TypeVar

MOST, MOST_OF_ADDRESS = 128, 32
"""Connections in all, and of one address."""
_SHARE_OF_FILES = 8
"""Strangers use at most one in so many of the files that this process may open."""
T = TypeVar("T")


class Strangers(Generic[T]):
    """The connections without a completed handshake. `T`: what stands for a connection."""

    def __init__(self, most: int | None = None, most_of_address: int = MOST_OF_ADDRESS) -> None:
        """`most`: connections in all; None: `MOST`, or fewer where the process may open few files."""
        files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = max(2, min(MOST, files // _SHARE_OF_FILES)) if most is None else most
        self._most_of_address = min(most_of_address, self._most)
        self._origins: dict[T, str] = {}

    def __len__(self) -> int:
        return len(self._origins)

    def add(self, connection: T, address: str) -> T | None:
        """Count a new connection; returns the one that has to be closed for it, if any."""
        origin, counts = origin_of(address), Counter(self._origins.values())
        victim = None
        if counts[origin] >= self._most_of_address:
            victim = self._one_of(origin)
        elif len(self._origins) >= self._most:
            victim = self._one_of(max(counts, key=counts.__getitem__))
        self._origins[connection] = origin
        return victim

    def remove(self, connection: T) -> None:
        """Count a connection no longer, if it is counted."""
        self._origins.pop(connection, None)

    def _one_of(self, origin: str) -> T:
        victim = random.choice([connection for connection, own in self._origins.items() if own == origin])
        del self._origins[victim]
        return victim


def origin_of(address: str) -> str:
    """The part of a peer's address that it cannot choose freely: in IPv6 the network of 64 bits, else the address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    return str(found.ipv4_mapped or ipaddress.ip_network((found, 64), strict=False))
