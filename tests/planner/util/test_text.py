"""Paths in the commands that are printed: they hold as they stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeplan.util.text import shell_path, shell_program


@pytest.mark.parametrize(
    ("path", "argument", "program"),
    [
        ("plan", "plan", "./plan"),
        ("-plan/launch.sh", "./-plan/launch.sh", "./-plan/launch.sh"),
        ("-a b", "'./-a b'", "'./-a b'"),
        ("/x/-plan", "/x/-plan", "/x/-plan"),
    ],
)
def test_a_path_is_neither_an_option_nor_looked_up(path: str, argument: str, program: str) -> None:
    assert (shell_path(Path(path)), shell_program(path)) == (argument, program)
