"""Shared-memory channel between two workers of one machine, with notices on a Unix socket.

The receiver offers a slot for a message that it expects; the sender writes the message into the slot and notifies the
receiver. Both notices are datagrams on a Unix socket, which also carries the slot's file descriptor. A thread that
waits for a notice reads the socket itself, so no other thread has to be woken. Messages that are large, or that the
receiver does not expect yet, are written by a separate thread while the worker computes. Workers connect through
abstract Unix sockets, and accept connections of their own user only.
"""

from __future__ import annotations

import array
import errno
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from pipeplan_launch.comm.ring_buffer import Slot, tensor_offsets, write_message

AT_ONCE_BYTES = 512 * 1024
"""Messages up to this size are written at once: handing them to the writer thread would take longer."""
OFFER, WRITTEN = range(2)
_NOTICE = struct.Struct("<BBIQQ")
_TIMEVAL = struct.Struct("ll")
_FILE_SPACE = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0
Key = tuple[int, int]
"""(direction, minibatch) of a message."""
_HELLO = struct.Struct("<I")


@dataclass(frozen=True)
class _Notice:
    """`OFFER`: the slot for a message and its size. `WRITTEN`: the message is in its slot."""

    kind: int
    key: Key
    slot: int = 0
    size: int = 0
    file: int | None = None

    def packed(self) -> bytes:
        return _NOTICE.pack(self.kind, self.key[0], self.slot, self.key[1], self.size)

    @staticmethod
    def unpacked(data: bytes, file: int | None) -> _Notice:
        kind, direction, slot, minibatch, size = _NOTICE.unpack(data)
        return _Notice(kind, (direction, minibatch), slot, size, file)


class PendingSend:
    """A message that is being sent. It keeps the tensors until they are written."""

    def __init__(self, key: Key, tensors: Sequence[Tensor]) -> None:
        self.key = key
        self.tensors = tensors
        self.size = tensor_offsets([tensor.nbytes for tensor in tensors])[-1]
        self.done = False
        self.error: Exception | None = None


class SharedMemoryChannel:
    """One end of the channel between two workers. Waiting methods raise `OSError` if the other end is gone or slow."""

    def __init__(self, connection: socket.socket, peer: int, timeout_s: float) -> None:
        set_socket_timeouts(connection, timeout_s)
        self.peer = peer
        self._socket = connection
        self._timeout_s = timeout_s
        self._turn = threading.Condition(threading.Lock())
        self._reading = False
        self._lost = False
        self._offers: dict[Key, _Notice] = {}
        self._written: set[Key] = set()
        self._files: dict[int, int] = {}
        self._waiting: queue.SimpleQueue[PendingSend] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None

    def offer(self, key: Key, slot: Slot, size: int) -> None:
        """Ask the other end to write a message of `size` bytes into this slot."""
        file = None if self.peer in slot.known else slot.file
        slot.known.add(self.peer)
        self._notify(_Notice(OFFER, key, slot.number, size, file))

    def wait_for(self, key: Key) -> None:
        """Wait until a message is in the slot that was offered for it."""
        self._wait(lambda: key in self._written)
        self._written.discard(key)

    def send(self, key: Key, tensors: Sequence[Tensor]) -> PendingSend:
        """Start sending contiguous tensors in CPU memory."""
        sending = PendingSend(key, tensors)
        self._read_available()
        if key in self._offers and sending.size <= AT_ONCE_BYTES:
            self._write(sending)
        else:
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_waiting, name=f"to-{self.peer}", daemon=True)
                self._writer.start()
            self._waiting.put(sending)
        return sending

    def settle(self, sending: PendingSend) -> None:
        """Wait until a message is written. The writer thread reads the socket meanwhile, so this thread must not."""
        with self._turn:
            while not sending.done:
                self._turn.wait()
        if sending.error is not None:
            raise sending.error

    def _write_waiting(self) -> None:
        """Main loop of the writer thread."""
        while True:
            sending = self._waiting.get()
            try:
                self._wait(lambda key=sending.key: key in self._offers)  # type: ignore[misc]
                self._write(sending)
            except Exception as error:
                with self._turn:
                    sending.error, sending.done = error, True
                    self._turn.notify_all()
            del sending  # otherwise its tensors stay alive until the next message

    def _write(self, sending: PendingSend) -> None:
        offer = self._offers.pop(sending.key)
        if offer.size != sending.size:
            raise OSError(f"the message has {sending.size} bytes where {offer.size} were expected")
        write_message(self._files[offer.slot], sending.tensors)
        self._notify(_Notice(WRITTEN, sending.key))
        with self._turn:
            sending.tensors, sending.done = (), True
            self._turn.notify_all()

    def _notify(self, notice: _Notice) -> None:
        files = [] if notice.file is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [notice.file]))]
        self._socket.sendmsg([notice.packed()], files)

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`. One of the waiting threads reads the socket for all of them."""
        deadline = time.monotonic() + self._timeout_s
        with self._turn:
            while not ready():
                if self._lost:
                    raise ConnectionError("connection closed by peer")
                if time.monotonic() > deadline:
                    raise TimeoutError(f"timed out after {self._timeout_s:g} s")
                if self._reading:
                    self._turn.wait(self._timeout_s)
                else:
                    self._read()

    def _read(self) -> None:
        """Wait for a notice. The lock is released meanwhile."""
        self._reading = True
        self._turn.release()
        try:
            notice = self._receive(0)
        finally:
            self._turn.acquire()
            self._reading = False
            self._turn.notify_all()
        self._note(notice)

    def _read_available(self) -> None:
        """Read the notices that have arrived, without waiting."""
        with self._turn:
            while not self._reading and not self._lost:
                notice = self._receive(socket.MSG_DONTWAIT)
                if notice is None:
                    return
                self._note(notice)

    def _receive(self, flags: int) -> _Notice | None:
        """The next notice; None on a timeout, and where the connection is lost."""
        try:
            data, ancillary, received_flags, _ = self._socket.recvmsg(
                _NOTICE.size, _FILE_SPACE, flags | socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionError:
            data, ancillary, received_flags = b"", [], 0
        if not data:
            self._lost = True
            return None
        if received_flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return _Notice.unpacked(data, array.array("i", ancillary[0][2])[0] if ancillary else None)

    def _note(self, notice: _Notice | None) -> None:
        if notice is None:
            return
        if notice.kind == WRITTEN:
            self._written.add(notice.key)
            return
        if notice.file is not None:
            self._files[notice.slot] = notice.file
        self._offers[notice.key] = notice


def set_socket_timeouts(connection: socket.socket, timeout_s: float) -> None:
    """Set the kernel's timeouts on a socket. Python's own timeouts cost one more system call per operation."""
    connection.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6)))


class LocalListener:
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

    def connect(self, rank: int, addresses: dict[int, str], timeout_s: float) -> dict[int, SharedMemoryChannel]:
        """Channels to the workers at these addresses, by rank. Lower ranks connect to higher ones. Raises `OSError`."""
        connections: dict[int, socket.socket] = {}
        for peer in (one for one in addresses if one > rank):
            connections[peer] = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connections[peer].connect("\0" + addresses[peer].rpartition("/")[2])
            connections[peer].sendall(_HELLO.pack(rank))
        self._socket.settimeout(timeout_s)
        while len(connections) < len(addresses):
            connection, _ = self._socket.accept()
            set_socket_timeouts(connection, timeout_s)
            if _user_of(connection) == os.getuid():
                (peer,) = _HELLO.unpack(connection.recv(_HELLO.size))
                connections[peer] = connection
        return {peer: SharedMemoryChannel(connection, peer, timeout_s) for peer, connection in connections.items()}

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()


def can_connect_locally(one: str, other: str) -> bool:
    """Whether the workers at two addresses are on one machine and can connect to each other."""
    return one.rpartition("/")[0] == other.rpartition("/")[0] != ""


def _user_of(connection: socket.socket) -> int:
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    user: int = struct.unpack("3i", packed)[1]
    return user
