"""A client of the workers' common store with a timeout.

If the connection to the store is cut, torch waits for an answer as long as TCP tries to deliver the request: a quarter
of an hour on Linux. Operations through this client end earlier.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any


class StoreTimeout(RuntimeError):
    """The store has not answered in time. It may answer again once the connection is back."""


class StoreClient:
    """torch's key-value store. Operations raise `RuntimeError` if they fail and `StoreTimeout` if they take too
    long."""

    def __init__(self, store: Any, patience_s: float) -> None:
        """`patience_s`: how long the store may be silent, counted from the first request that it leaves unanswered."""
        self._store, self._prefix = store, ""
        self._requests = _RequestThread(patience_s)

    def under(self, prefix: str) -> StoreClient:
        """A client of this store that prefixes all keys, compatible with torch's `PrefixStore`."""
        other = StoreClient.__new__(StoreClient)
        other._store, other._requests = self._store, self._requests
        other._prefix = f"{self._prefix}{prefix}/"
        return other

    def set(self, key: str, value: str, /) -> None:
        """Set the value of a key."""
        self._requests.call(lambda: self._store.set(self._prefix + key, value))

    def get(self, key: str, /) -> bytes:
        """The value of a key that is set."""
        value: bytes = self._requests.call(lambda: self._store.get(self._prefix + key))
        return value

    def check(self, keys: list[str], /) -> bool:
        """Whether all these keys are set."""
        return bool(self._requests.call(lambda: self._store.check([self._prefix + key for key in keys])))

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, which starts at 0; returns the sum."""
        return int(self._requests.call(lambda: self._store.add(self._prefix + key, amount)))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a value if it is `expected`, or if there is none and `expected` is ""; returns the value afterwards."""
        value: bytes = self._requests.call(lambda: self._store.compare_set(self._prefix + key, expected, desired))
        return value


class _Request:
    def __init__(self, operation: Callable[[], Any]) -> None:
        self._operation = operation
        self._answer: Any = None
        self._error: Exception | None = None
        self.is_answered = False

    def execute(self) -> None:
        try:
            self._answer = self._operation()
        except Exception as error:
            self._error = error

    def answer(self) -> Any:
        """The result of the operation. Raises what the operation raised."""
        if self._error is not None:
            raise self._error
        return self._answer


class _RequestThread:
    """A thread that executes one request after another.

    The timeout is for the whole queue, not for each request. Otherwise every request to a store that has long been
    silent would wait as long again, and a worker that is cut off makes several of them before it ends.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._open: deque[_Request] = deque()
        """Unanswered requests. The first one is being executed."""
        self._silent_since = 0.0
        threading.Thread(target=self._work, daemon=True, name="store").start()

    def call(self, operation: Callable[[], Any]) -> Any:
        """The operation's result. Raises what the operation raises, or `StoreTimeout`."""
        request = _Request(operation)
        with self._changed:
            if not self._open:
                self._silent_since = time.monotonic()
            self._open.append(request)
            self._changed.notify_all()
            while not request.is_answered:
                left_s = self._silent_since + self._patience_s - time.monotonic()
                if left_s <= 0:
                    if request is not self._open[0]:
                        self._open.remove(request)
                    raise StoreTimeout(f"it did not answer within {self._patience_s:g} s")
                self._changed.wait(left_s)
        return request.answer()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._open:
                    self._changed.wait()
                request = self._open[0]
            request.execute()
            with self._changed:
                self._open.popleft()
                self._silent_since = time.monotonic()
                request.is_answered = True
                self._changed.notify_all()
