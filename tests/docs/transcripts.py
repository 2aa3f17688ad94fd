"""Commands with their output, as the pages of docs/ show them and as they are printed now."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path
from unittest import mock

from pipeplan.cli import main as command_line

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("choice.md", "profile.md")
BLOCK = re.compile(r"```console\n\$ (pipeplan [^\n]*)\n(.*?)```", re.DOTALL)


def printed(command: str) -> str:
    """What a command prints, run in an empty folder."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            return printed_here(command)
        finally:
            os.chdir(here)


def printed_here(command: str) -> str:
    """What a command prints on standard output, without the blanks at the ends of lines."""
    out = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(sys, "argv", shlex.split(command)))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        stack.enter_context(contextlib.suppress(SystemExit))
        command_line()
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def transcripts(page: str) -> list[tuple[str, str]]:
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))
