"""The workers' common store, asked with patience that ends.

Where the way to it is cut, torch waits for its answer for as long as TCP tries to deliver the question: a quarter of an
hour on Linux. What must not wait so long asks through here.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any


class Unanswered(RuntimeError):
    """The store has been silent for too long. It may answer again once the way to it is back."""


class Asked:
    """torch's store of keys. Operations raise `RuntimeError` where they fail, `Unanswered` where they take too long."""

    def __init__(self, store: Any, patience_s: float) -> None:
        """`patience_s`: with a store that answers nothing at all, from the first question that it leaves open."""
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


class _Question:
    def __init__(self, ask: Callable[[], Any]) -> None:
        self._ask = ask
        self._answer: Any = None
        self._error: Exception | None = None
        self.is_answered = False

    def put(self) -> None:
        try:
            self._answer = self._ask()
        except Exception as error:
            self._error = error

    def answer(self) -> Any:
        """Raises what asking raised."""
        if self._error is not None:
            raise self._error
        return self._answer


class _Line:
    """A thread that asks one question after another.

    Patience is with the line, not with each question: whoever asks on a line that has long been silent would else wait
    as long again, and the end of a worker that is cut off takes several questions.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._changed = threading.Condition()
        self._open: deque[_Question] = deque()
        """The first is on its way."""
        self._silent_since = 0.0
        threading.Thread(target=self._work, daemon=True, name="store").start()

    def ask(self, ask: Callable[[], Any]) -> Any:
        """The answer; raises what asking raises, or `Unanswered`."""
        question = _Question(ask)
        with self._changed:
            if not self._open:
                self._silent_since = time.monotonic()
            self._open.append(question)
            self._changed.notify_all()
            while not question.is_answered:
                left_s = self._silent_since + self._patience_s - time.monotonic()
                if left_s <= 0:
                    if question is not self._open[0]:
                        self._open.remove(question)
                    raise Unanswered(f"it did not answer within {self._patience_s:g} s")
                self._changed.wait(left_s)
        return question.answer()

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._open:
                    self._changed.wait()
                question = self._open[0]
            question.put()
            with self._changed:
                self._open.popleft()
                self._silent_since = time.monotonic()
                question.is_answered = True
                self._changed.notify_all()
