"""Values that workers send each other come back as they were, and nothing else comes back."""

from __future__ import annotations

import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec import msgpack

from pipeplan_launch.comm import worker_values
from pipeplan_launch.errors import LaunchError


@dataclass(frozen=True)
class Inner:
    name: str
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: Inner
    path: Path
    rates: dict[Inner, float] = field(default_factory=dict)
    note: str | None = None


VALUES: list[tuple[Any, Any]] = [
    (None, int | None),
    (3, int | None),
    (2**63, int),
    (1.5, float),
    (3, float),
    (math.inf, float),
    ("a\n\x00é", str),
    ([1, 2], list[int]),
    ((1, "x"), tuple[int, str]),
    (((1,), (2, 3)), tuple[tuple[int, ...], ...]),
    ({"a": {"b": [None, True]}}, dict[str, dict[str, list[bool | None]]]),
    (Outer(Inner("i", (1,)), Path("/a b\udcff"), {Inner("k", (2, 3)): 0.25}), Outer),
    ((None, {"w": Inner("i")}), tuple[str | None, dict[str, Inner]]),
]


def test_values_come_back() -> None:
    for value, kind in VALUES:
        found = worker_values.decode(worker_values.encode(value), kind)
        assert found == value
        assert isinstance(found, float) or type(found) is type(value)


def test_anything_else_is_one_line() -> None:
    for data, kind in (
        (pickle.dumps({"a": 1}), dict[str, int]),
        (b"", int),
        (b"\x91" * 100_000, Any),
        (msgpack.encode(True), int),
        (msgpack.encode("x"), float),
        (msgpack.encode([1]), tuple[int, int]),
        (msgpack.encode({"name": 1}), Inner),
        (msgpack.encode({"sizes": [1]}), Inner),
        (msgpack.encode([["a"]]), dict[str, int]),
        (msgpack.encode("/a"), Path),
        (msgpack.encode(None), Inner),
        (b"\xa1\xff", str),
    ):
        with pytest.raises(LaunchError, match=r"^another worker sent a wrong value") as caught:
            worker_values.decode(data, kind)
        assert len(str(caught.value).splitlines()) == 1


def test_no_code_is_sent() -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        worker_values.encode([print])


def test_no_module_of_the_executor_sends_pickles() -> None:
    import pipeplan_launch

    for path in Path(pipeplan_launch.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert "_object(" not in text.replace("def _object(", "").replace("return _object(", ""), path
        assert "_object_list(" not in text, path
        assert "pickle.load" not in text, path
