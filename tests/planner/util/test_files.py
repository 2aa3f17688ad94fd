"""Files are written whole or not at all; errors of documents name the place, the field and what was found."""

from __future__ import annotations

import json
import os
import re
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec import Struct

from pipeplan.errors import InputError
from pipeplan.util.files import Node, read_document, refuse_unwritable, write_text, write_together
from pipeplan.util.typed import Amount, Bytes, Natural, Positive, WrittenRate, decode


def test_what_a_link_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert (link.is_symlink(), target.read_text(), os.listdir(target.parent)) == (True, "new", ["target"])


TEXTS = {"a.py": ("a", 0o644), "b.sh": ("b", 0o755)}


def test_files_that_belong_together_are_all_written_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "made" / "here"
    write_together(here, TEXTS)
    assert {path.name: (path.read_text(), path.stat().st_mode & 0o777) for path in here.iterdir()} == TEXTS
    with pytest.raises(InputError, match=r"a\.py exists: give another folder with -o, or --force"):
        write_together(here, TEXTS)
    (tmp_path / "in" / "b.sh").mkdir(parents=True)
    for place, said in ((here / "a.py" / "inner", "a.py is not a folder"), (tmp_path / "in", "b.sh is a folder")):
        with pytest.raises(InputError, match=said):
            write_together(place, TEXTS, force=True)
    assert not (tmp_path / "in" / "a.py").exists()
    usual = Path.write_text

    def full(path: Path, text: str, **given: str) -> int:
        if path.name == "b.sh":
            raise OSError(28, "No space left on device")
        return usual(path, text, **given)

    monkeypatch.setattr(Path, "write_text", full)
    for folder in ("new/folder", "made/here"):
        with pytest.raises(InputError, match=rf"cannot write .*{folder}: No space left"):
            write_together(tmp_path / folder, {name: ("other", mode) for name, (_, mode) in TEXTS.items()}, force=True)
    assert not (tmp_path / "new").exists()
    assert {path.name: path.read_text() for path in here.iterdir()} == {name: text for name, (text, _) in TEXTS.items()}


def test_a_pipe_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_text(pipe, "text")
    reader.join()
    assert read == ["text"]
    assert pipe.is_fifo()


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    refuse_unwritable(tmp_path / "new" / "folder" / "profile.json")
    refuse_unwritable(Path("/dev/null"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "file").touch()
    for path in (tmp_path, Path("/proc/profile.json"), tmp_path / "file" / "profile.json"):
        with pytest.raises(InputError, match="is a folder" if path == tmp_path else "cannot write"):
            refuse_unwritable(path)


def test_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for mask in (0o022, 0o077, 0o002):
            os.umask(mask)
            write_text(tmp_path / "file", "text")
            write_text(tmp_path / "script", "text", mode=0o777)
            assert os.umask(mask) == mask
            assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~mask
            assert (tmp_path / "script").stat().st_mode & 0o777 == 0o777 & ~mask
    finally:
        os.umask(before)


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
    (
        {"parts": [{"name": "x", "seconds": 10**4000}]},
        f"{PART}seconds: expected a finite number of at most 9.22337e+18",
    ),
    ({"parts": [{"name": "x", "seconds": 1, "size": 10**4000}]}, f"{PART}size: expected a finite number of at most 9"),
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


def test_half_a_character_is_refused_wherever_it_is(tmp_path: Path) -> None:
    path, head = tmp_path / "a.json", {"format": "test", "version": 1}
    path.write_text(json.dumps(head | {"a": ["\ud800"]}))
    with pytest.raises(InputError, match="half a character"):
        read_document(path, "test", 1)
    path.write_text(json.dumps(head | {"a": ["\U0001f600"]}))
    assert read_document(path, "test", 1)["a"].value == ["\U0001f600"]
