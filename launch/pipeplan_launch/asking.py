"""The workers' common store, asked with patience that ends.

Where the way to it is cut, torch waits for its answer for as long as TCP tries to deliver the question: a quarter of an
hour on Linux. What must not wait so long asks through here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

PATIENCE_S = 30.0


class Asked:
    """torch's store of keys. Every operation raises `RuntimeError` where no answer comes in time; none comes later."""

    def __init__(self, store: Any, patience_s: float = PATIENCE_S) -> None:
        self._store, self._prefix = store, ""
        self._line = _Line(patience_s)

    def under(self, prefix: str) -> Asked:
        """The same store, with the keys that torch's PrefixStore makes of this prefix."""
        other = Asked.__new__(Asked)
        other._store, other._line = self._store, self._line
        other._prefix = f"{self._prefix}{prefix}/"
        return other

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""
        self._line.ask(lambda: self._store.set(self._prefix + key, value))

    def get(self, key: str, /) -> bytes:
        """A value that is there."""
        found: bytes = self._line.ask(lambda: self._store.get(self._prefix + key))
        return found

    def check(self, keys: list[str], /) -> bool:
        """Whether all these keys are there."""
        return bool(self._line.ask(lambda: self._store.check([self._prefix + key for key in keys])))

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, 0 if it was not there; returns the sum."""
        return int(self._line.ask(lambda: self._store.add(self._prefix + key, amount)))

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Set a value if it is the expected one, or if there is none and "" is expected; returns what is there then."""
        found: bytes = self._line.ask(lambda: self._store.compare_set(self._prefix + key, expected, desired))
        return found


class _Line:
    """A thread that asks one question after another."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._questions: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._silent = False
        threading.Thread(target=self._work, daemon=True, name="store").start()

    def ask(self, question: Callable[[], Any]) -> Any:
        """The answer; raises what asking raises, or `RuntimeError`."""
        if self._silent:
            raise RuntimeError("it does not answer")
        answered, found = threading.Event(), _Found()

        def run() -> None:
            try:
                found.answer = question()
            except Exception as error:
                found.error = error
            answered.set()

        self._questions.put(run)
        if not answered.wait(self._patience_s):
            self._silent = True
            raise RuntimeError(f"it did not answer within {self._patience_s:g} s")
        if found.error is not None:
            raise found.error
        return found.answer

    def _work(self) -> None:
        while True:
            self._questions.get()()


class _Found:
    answer: Any = None
    error: Exception | None = None
