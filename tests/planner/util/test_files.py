"""Files are written whole or not at all, where they were asked for."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from pipeplan.errors import InputError
from pipeplan.util.files import read_toml, refuse_unwritable, write_text, write_together


def test_what_a_link_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert os.listdir(target.parent) == ["target"]


TEXTS = {"a.py": ("a", 0o644), "b.sh": ("b", 0o755)}


def test_files_that_belong_together_are_all_written_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_together(tmp_path / "made" / "here", TEXTS)
    made = {path.name: (path.read_text(), path.stat().st_mode & 0o777) for path in (tmp_path / "made/here").iterdir()}
    assert made == TEXTS
    with pytest.raises(InputError, match=r"a\.py exists: give another folder with -o, or --force"):
        write_together(tmp_path / "made" / "here", TEXTS)
    (tmp_path / "in" / "b.sh").mkdir(parents=True)
    for place, said in (
        (tmp_path / "made/here/a.py/inner", "a.py is not a folder"),
        (tmp_path / "in", "b.sh is a fol"),
    ):
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
    assert (tmp_path / "made" / "here" / "a.py").read_text() == "a"
    assert len(list((tmp_path / "made" / "here").iterdir())) == 2


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
    with pytest.raises(InputError, match="is a folder"):
        refuse_unwritable(tmp_path)
    for path in (Path("/proc/profile.json"), tmp_path / "file" / "profile.json"):
        (tmp_path / "file").touch()
        with pytest.raises(InputError, match="cannot write"):
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


def test_a_number_with_too_many_digits_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    for number in ("0x" + "f" * 4300, "0o" + "7" * 9000, "0b" + "1" * 20000, "9" * 4400, "1e99999"):
        path.write_text(f'format = "a"\nversion = {number}\n')
        with pytest.raises(InputError, match=r"too many digits|at most 9.22337e\+18") as found:
            read_toml(path, "a", 1)
        assert len(str(found.value)) < 300
