"""Messages between two workers of one machine: through shared memory, with a socket that says what lies where.

The receiver offers a slot for a message that it expects; the sender writes the message into it and says that it is
there. Both notices are datagrams on a Unix socket, which also carries the slot's file. Who waits for a notice reads the
socket itself, so that there is no other thread to wake; a thread of its own writes what is large, or not yet expected,
while the worker computes.
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

from torch import Tensor

from pipeplan_launch.slots import Slot, layout, write

AT_ONCE_BYTES = 512 * 1024
"""Up to here, writing a message takes less time than having another thread write it."""

OFFER, HERE = range(2)
_NOTICE = struct.Struct("<BBIQQ")
_TIMEVAL = struct.Struct("ll")
_FILE_SPACE = socket.CMSG_SPACE(4) if hasattr(socket, "CMSG_SPACE") else 0

Key = tuple[int, int]
"""(direction, minibatch) of a message."""


@dataclass(frozen=True)
class _Notice:
    """`OFFER`: the slot for a message and its size; `HERE`: the message is in it."""

    kind: int
    key: Key
    slot: int = 0
    size: int = 0
    file: int | None = None

    def packed(self) -> bytes:
        return _NOTICE.pack(self.kind, self.key[0], self.slot, self.key[1], self.size)

    @staticmethod
    def of(data: bytes, file: int | None) -> _Notice:
        kind, direction, slot, minibatch, size = _NOTICE.unpack(data)
        return _Notice(kind, (direction, minibatch), slot, size, file)


class Sending:
    """A message on its way out; it keeps the tensors until they are written."""

    def __init__(self, key: Key, tensors: Sequence[Tensor]) -> None:
        self.key = key
        self.tensors = tensors
        self.size = layout([tensor.nbytes for tensor in tensors])[-1]
        self.done = False
        self.error: Exception | None = None


class Link:
    """One end of the connection between two workers. What waits raises `OSError` if the other end is gone or slow."""

    def __init__(self, connection: socket.socket, peer: int, timeout_s: float) -> None:
        limit_waits(connection, timeout_s)
        self.peer = peer
        self._socket = connection
        self._timeout_s = timeout_s
        self._turn = threading.Condition(threading.Lock())
        self._reading = False
        self._lost = False
        self._offers: dict[Key, _Notice] = {}
        self._here: set[Key] = set()
        self._files: dict[int, int] = {}
        self._waiting: queue.SimpleQueue[Sending] = queue.SimpleQueue()
        self._writer: threading.Thread | None = None

    def offer(self, key: Key, slot: Slot, size: int) -> None:
        """Have the other end write a message of `size` bytes to this slot."""
        file = None if self.peer in slot.known else slot.file
        slot.known.add(self.peer)
        self._tell(_Notice(OFFER, key, slot.number, size, file))

    def wait_for(self, key: Key) -> None:
        """Until a message is in the slot that was offered for it."""
        self._wait(lambda: key in self._here)
        self._here.discard(key)

    def send(self, key: Key, tensors: Sequence[Tensor]) -> Sending:
        """Start sending contiguous tensors in CPU memory."""
        sending = Sending(key, tensors)
        self._take_in()
        if key in self._offers and sending.size <= AT_ONCE_BYTES:
            self._write(sending)
        else:
            if self._writer is None:
                self._writer = threading.Thread(target=self._write_waiting, name=f"to-{self.peer}", daemon=True)
                self._writer.start()
            self._waiting.put(sending)
        return sending

    def settle(self, sending: Sending) -> None:
        """Until a message is written. Its writer reads the socket where it must: reading here would miss its end."""
        with self._turn:
            while not sending.done:
                self._turn.wait()
        if sending.error is not None:
            raise sending.error

    def _write_waiting(self) -> None:
        """What the link's own thread does."""
        while True:
            sending = self._waiting.get()
            try:
                self._wait(lambda key=sending.key: key in self._offers)  # type: ignore[misc]
                self._write(sending)
            except Exception as error:
                with self._turn:
                    sending.error, sending.done = error, True
                    self._turn.notify_all()
            del sending  # or it keeps its tensors until the next one

    def _write(self, sending: Sending) -> None:
        offer = self._offers.pop(sending.key)
        if offer.size != sending.size:
            raise OSError(f"the message has {sending.size} bytes where {offer.size} were expected")
        write(self._files[offer.slot], sending.tensors)
        self._tell(_Notice(HERE, sending.key))
        with self._turn:
            sending.tensors, sending.done = (), True
            self._turn.notify_all()

    def _tell(self, notice: _Notice) -> None:
        files = [] if notice.file is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [notice.file]))]
        self._socket.sendmsg([notice.packed()], files)

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Until `ready`. One of the threads that wait reads the socket, for all of them."""
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
        """Wait for a notice, without the lock."""
        self._reading = True
        self._turn.release()
        try:
            notice = self._receive(0)
        finally:
            self._turn.acquire()
            self._reading = False
            self._turn.notify_all()
        self._note(notice)

    def _take_in(self) -> None:
        """Read what notices have come, without waiting."""
        with self._turn:
            while not self._reading and not self._lost:
                notice = self._receive(socket.MSG_DONTWAIT)
                if notice is None:
                    return
                self._note(notice)

    def _receive(self, flags: int) -> _Notice | None:
        """The next notice; None if there is none in time."""
        try:
            data, extra, got, _ = self._socket.recvmsg(_NOTICE.size, _FILE_SPACE, flags | socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return None
        except ConnectionError:
            data, extra, got = b"", [], 0
        if not data:
            self._lost = True
            return None
        if got & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return _Notice.of(data, array.array("i", extra[0][2])[0] if extra else None)

    def _note(self, notice: _Notice | None) -> None:
        if notice is None:
            return
        if notice.kind == HERE:
            self._here.add(notice.key)
            return
        if notice.file is not None:
            self._files[notice.slot] = notice.file
        self._offers[notice.key] = notice


def limit_waits(connection: socket.socket, timeout_s: float) -> None:
    """Let the kernel time out: Python's own way costs another call each time."""
    connection.setblocking(True)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6)))
