"""docs/running.md shows what `pipeplan replan` prints, and docs/file-formats.md describes its JSON document.

`python tests/docs/test_replan_page.py` writes the transcript anew.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from manifests import write_manifest
from transcripts import DOCS, printed_here

from pipeplan.replanning.replan import RELAXED
from pipeplan_launch.checkpoint.manifest import Position

PAGE = DOCS / "running.md"
BLOCK = re.compile(r"(```console\n\$ (pipeplan solve [^\n]*)\n…\n\$ (pipeplan replan [^\n]*)\n…\n)(.*?)```", re.DOTALL)
BEGINS = "Without "
"""Of the answer, what is the same every time: above it stand seconds that the solvers took."""


def _replanned(solve: str, replan: str) -> str:
    """What replanning prints after solving and a run with a checkpoint, all in an empty folder."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            printed_here(solve)
            checkpoint = Path("plan/runs/20260131T120000Z/checkpoints/epoch-0003-sample-00064000")
            checkpoint.mkdir(parents=True)
            write_manifest(checkpoint, Position(2, 1000, 4000))
            return printed_here(replan)
        finally:
            os.chdir(here)


def _answer() -> str:
    """What the commands of the page print."""
    return _replanned(_shown()[2], _shown()[3])


def _shown() -> re.Match[str]:
    found = BLOCK.search(PAGE.read_text(encoding="utf-8"))
    assert found is not None
    return found


def _tail(answer: str) -> str:
    return answer[answer.index(BEGINS) :]


@pytest.mark.site  # Takes seconds: run with the other commands of the documents.
def test_the_page_shows_what_the_command_prints() -> None:
    assert _shown()[4] == _tail(_answer())


def test_every_field_is_described() -> None:
    text = PAGE.read_text(encoding="utf-8")
    small = "pipeplan solve mnist-v100 --cluster A --servers 2 --solver dp --schedule 1f1b-stashing"
    answer = json.loads(_replanned(small, "pipeplan replan plan --lost server1.worker3 --json"))
    described = (DOCS / "file-formats.md").read_text(encoding="utf-8").partition("## `replan --json`")[2]
    for name in _names({name: value for name, value in answer.items() if name != "plan"} | {"plan": None}):
        assert f"`{name}`" in described, name
    assert not [name for name in RELAXED if f"`{name}`" not in text]


def _names(value: Any) -> Iterator[str]:
    """The names of all fields, but for those of variables in an environment."""
    if isinstance(value, list):
        for item in value:
            yield from _names(item)
    elif isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from () if name == "environment" else _names(item)


def main() -> None:
    """Write the transcript anew."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda found: f"{found[1]}{_tail(_answer())}```", text))


if __name__ == "__main__":
    main()
