"""Compiled code is loaded without what only compiling needs, and goes when no version of the loops uses it."""

from __future__ import annotations

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan.solvers.dp.compiled import availability, old_code
from pipeplan.solvers.dp.compiled.old_code import DAY_S, UNUSED_S, note_use

NOW = 1e9
NAMES = "0123456789abcdef", "fedcba9876543210", "0000000000000000"


def _made(folder: Path, age_s: float, read_s: float | None = None) -> Path:
    """A folder with a file of compiled code, which were written and perhaps read so many seconds ago."""
    code = folder / "compiled" / "loops.nbc"
    code.parent.mkdir(parents=True)
    code.touch()
    os.utime(code, (NOW - (age_s if read_s is None else read_s), NOW - age_s))
    os.utime(folder, (NOW - age_s, NOW - age_s))
    return folder


def _left(root: Path) -> list[str]:
    return sorted(one.name for one in root.iterdir())


def test_code_of_other_versions_goes_after_a_month_without_use(tmp_path: Path) -> None:
    own, old, recent = NAMES
    _made(tmp_path / old, UNUSED_S + 1)
    _made(tmp_path / recent, UNUSED_S - 1)
    note_use(tmp_path / own, NOW)
    assert _left(tmp_path) == sorted([own, recent])
    assert (tmp_path / own).stat().st_mtime == NOW


def test_code_that_was_read_lately_stays(tmp_path: Path) -> None:
    _made(tmp_path / NAMES[1], UNUSED_S + 1, read_s=DAY_S)
    note_use(tmp_path / NAMES[0], NOW)
    assert NAMES[1] in _left(tmp_path)


def test_what_is_no_version_stays(tmp_path: Path) -> None:
    _made(tmp_path / "notes", 2 * UNUSED_S)
    (tmp_path / NAMES[1]).symlink_to(_made(tmp_path / "elsewhere", 2 * UNUSED_S))
    (tmp_path / NAMES[2]).touch()
    os.utime(tmp_path / NAMES[2], (0, 0))
    before = _left(tmp_path)
    note_use(tmp_path / "cafe" / NAMES[0], NOW)
    note_use(tmp_path / NAMES[0], NOW)
    assert _left(tmp_path) == sorted([*before, "cafe", NAMES[0]])


def test_others_are_looked_for_once_a_day(tmp_path: Path) -> None:
    own = _made(tmp_path / NAMES[0], DAY_S - 1)
    _made(tmp_path / NAMES[1], UNUSED_S + 1)
    note_use(own, NOW)
    assert _left(tmp_path) == sorted(NAMES[:2])
    note_use(own, NOW + 2)
    assert _left(tmp_path) == [NAMES[0]]


def test_what_an_interrupted_removal_left_goes(tmp_path: Path) -> None:
    _made(tmp_path / f"removed-{NAMES[1]}-123", UNUSED_S + 1)
    note_use(tmp_path / NAMES[0], NOW)
    assert _left(tmp_path) == [NAMES[0]]


def test_code_that_comes_to_be_used_while_it_is_removed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, rename = _made(tmp_path / NAMES[1], UNUSED_S + 1), Path.rename

    def used(path: Path, to: Path) -> Path:
        if path == folder:
            os.utime(path, (NOW, NOW))
        return rename(path, to)

    monkeypatch.setattr(old_code.Path, "rename", used)
    note_use(tmp_path / NAMES[0], NOW)
    assert _left(tmp_path) == sorted(NAMES[:2])


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    note_use(tmp_path / "file" / NAMES[0], NOW)


def test_code_depends_on_every_file_with_a_constant_of_the_loops() -> None:
    """numba compiles the value of a constant into the code, and would go on with an older one."""
    known = set(availability.sources())
    for path in Path(availability.__file__).parent.glob("*.py"):
        imports = [one for one in ast.walk(ast.parse(path.read_text())) if isinstance(one, ast.ImportFrom)]
        if not any(one.module == "pipeplan.solvers.dp.compiled.jit" for one in imports):
            continue
        for one in imports:
            if any(alias.name.isupper() for alias in one.names):
                assert Path(str(importlib.import_module(str(one.module)).__file__)) in known, (path.name, one.module)


LOOP = """
import sys
import numpy as np
from pipeplan.solvers.dp.compiled.jit import compiled, entry

@compiled
def twice(value):
    return 2 * value

@entry
def total(values, count):
    found = 0.0
    for index in range(count):
        found += twice(values[index])
    return found

print(total(np.arange(4.0), 4), "numba.np.arraymath" in sys.modules, total(np.arange(4, dtype=sys.argv[1]), 4))
"""


def test_code_on_disk_is_loaded_without_preparing_to_compile(tmp_path: Path) -> None:
    """The last call compiles the function for other numbers, after the code for the first ones was loaded."""
    pytest.importorskip("numba")
    script = tmp_path / "loop.py"
    script.write_text(LOOP)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    told = []
    for numbers in ("int64", "int32"):
        command = [sys.executable, str(script), numbers]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        told.append(done.stdout)
    assert told == ["12.0 True 12.0\n", "12.0 False 12.0\n"]
