"""Documents are decoded from types, and every error names the place, the field and what was found."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import Struct

from pipeplan.errors import InputError
from pipeplan.util.files import Node, read_document
from pipeplan.util.typed import Amount, Bytes, Natural, Positive, WrittenRate, decode


@dataclass(frozen=True)
class Part:
    name: str
    seconds: Amount
    size: Bytes = 0


class Whole(Struct, forbid_unknown_fields=True):
    parts: tuple[Part, ...]
    kind: Literal["one", "other"] = "one"
    rate: WrittenRate = WrittenRate(1)
    pair: tuple[str, Positive] = ("a", 1)
    maybe: Natural | None = None
    either: tuple[Part, ...] | Part = ()
    named: dict[str, Amount] | None = None


GOOD: dict[str, Any] = {"parts": [{"name": "x", "seconds": 1}]}


def _with(**changes: Any) -> Node:
    return Node(GOOD | changes, "file.json")


def test_numbers_take_the_types_of_their_fields() -> None:
    found = decode(_with(parts=[{"name": "x", "seconds": 1, "size": 4e6}], rate="8 Gbit/s", maybe=2.0), Whole)
    (part,) = found.parts
    assert (part.size, type(part.size), type(part.seconds)) == (4_000_000, int, float)
    assert (found.rate, found.maybe, type(found.maybe)) == (1e9, 2, int)


PART = "parts[0] ('x'): "
WRONG: tuple[tuple[dict[str, Any], str], ...] = (
    ({"parts": 3}, "parts: expected a list, found 3"),
    ({"parts": [3]}, "parts[0]: expected a mapping, found 3"),
    ({"parts": [{"name": "x"}]}, f"{PART}the field 'seconds' is missing"),
    ({"parts": [{"name": "x", "seconds": "1"}]}, f"{PART}seconds: expected a number, found '1'"),
    ({"parts": [{"name": "x", "seconds": -1}]}, f"{PART}seconds: expected at least 0, found -1"),
    ({"parts": [{"name": "x", "seconds": float("nan")}]}, f"{PART}seconds: expected a finite number"),
    ({"parts": [{"name": "x", "seconds": float("inf")}]}, f"{PART}seconds: expected a finite number of at most 9.2"),
    ({"parts": [{"name": "x", "seconds": 1, "size": 2**53 + 1}]}, f"{PART}size: expected a finite number of at most 9"),
    ({"parts": [{"name": "x", "seconds": 1, "size": 2.5}]}, f"{PART}size: expected a whole number, found 2.5"),
    ({"kind": "two"}, "kind: expected 'one' or 'other', found 'two'"),
    ({"kynd": "one"}, "there is no field 'kynd'; did you mean 'kind'"),
    ({"a\nb": "one"}, "there is no field 'a\\nb'; "),
    ({"z" * 5000: "one"}, "there is no field '" + "z" * 36 + "…; there are: "),
    ({"pair": ["a"]}, "pair: expected a list of 2, found 1 values"),
    ({"pair": ["a", 0]}, "pair[1]: expected at least 1, found 0"),
    ({"maybe": "1"}, "maybe: expected a whole number, found '1'"),
    ({"rate": "fast"}, "rate: expected a rate such as '10 Gbit/s' or '12 GB/s', found 'fast'"),
    ({"either": {"name": "x", "seconds": True}}, "either: seconds: expected a number, found True"),
    ({"either": [{"name": "x", "seconds": True}]}, "either[0] ('x'): seconds: expected a number, found True"),
    ({"named": {"a": "x"}}, "named: 'a': expected a number, found 'x'"),
)


def test_an_error_says_where_and_what() -> None:
    for changes, message in WRONG:
        with pytest.raises(InputError, match=f"^{re.escape(f'file.json: {message}')}"):
            decode(_with(**changes), Whole)


def test_a_number_of_many_digits_is_one_line() -> None:
    with pytest.raises(InputError, match="at most 9007199254740992, found 1000"):
        decode(Node({"name": "x", "seconds": 1, "size": 10**4000}, "f"), Part)
    with pytest.raises(InputError, match=r"seconds: expected a finite number of at most 9\.22337e\+18"):
        decode(Node({"name": "x", "seconds": 10**4000}, "f"), Part)


def test_half_a_character_is_refused_wherever_it_is(tmp_path: Path) -> None:
    head = {"format": "test", "version": 1}
    (tmp_path / "half.json").write_text(json.dumps(head | {"a": ["\ud800"]}))
    with pytest.raises(InputError, match="half a character"):
        read_document(tmp_path / "half.json", "test", 1)
    (tmp_path / "whole.json").write_text(json.dumps(head | {"a": ["\U0001f600"]}))
    assert read_document(tmp_path / "whole.json", "test", 1)["a"].value == ["\U0001f600"]
