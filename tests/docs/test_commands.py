"""Every command in the documents is one that there is, and is run, or says why not; `blocks.py` tells how.

`pytest -m site tests/docs` runs them. `python tests/docs/test_commands.py PAGE` runs a page and shows what it prints.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import click
import pytest
from blocks import FENCE, KINDS, ROOT, SHELL, Block, blocks, pages, python_blocks, shell_blocks
from transcripts import PAGES as TRANSCRIPTS
from transcripts import transcripts

from pipeplan.cli import cli
from pipeplan.errors import PipeplanError
from pipeplan_launch.command_line import worker_parser

OPERATORS = {"&&", "||", "|", "&", ";", ">", ">>", "<", "(", ")", "do", "done"}
RUN = "plan/runs/20260131T120000Z"
"""The name that pages give to a run."""
FOLDERS = {
    "empty": "",
    "model": "",
    "profiled": "pipeplan profile my_model.py:build",
    "planned": "pipeplan solve --cluster local --workers 3",
    "trained": f"plan/launch.sh --epochs 2 --run-dir {RUN}",
}
"""What a block finds when it is run, each with all that those before it have, and what makes it of them."""
WRONG_ON_PURPOSE = ("errors.md",)
"""Pages with tests of their own, whose commands in sentences are what people mistype."""
ALL = [block for page in pages() for block in shell_blocks(page)]
SECONDS = 300


def _shown_elsewhere(block: Block) -> bool:
    """`test_transcripts.py` runs it, and looks at what it prints."""
    page = block.page.removeprefix("docs/")
    return page in TRANSCRIPTS and any(block.text.startswith(f"$ {command}\n") for command, _ in transcripts(page))


TO_RUN = [block for block in ALL if block.runs and not block.marked("slow") and not _shown_elsewhere(block)]
SLOW = [block for block in ALL if block.marked("slow")]


def invocations(block: Block) -> Iterator[list[str]]:
    """The words of every command of a block, without the variables that are set for it."""
    for command in block.commands:
        lexer = shlex.shlex(command, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        words: list[str] = []
        for token in [*lexer, ";"]:
            if token not in OPERATORS:
                words.append(token)
                continue
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words
            words = []


def _is(word: str, name: str) -> bool:
    return Path(word).name == name


def _parsed(words: list[str]) -> None:
    """Have pipeplan, or a plan's launch.sh, read its options, and do nothing."""
    if "-m" in words and words[words.index("-m") + 1 :][:1] == ["pipeplan"]:
        words = words[words.index("-m") + 1 :]
    if _is(words[0], "pipeplan"):
        with mock.patch.object(click.Command, "invoke"):
            try:
                cli.main(words[1:], standalone_mode=False)
            except click.BadParameter as error:
                # Files that a page speaks of need not be here.
                if error.param is None or not isinstance(error.param.type, click.Path | click.File):
                    raise
    elif _is(words[0], "launch.sh"):
        worker_parser("launch.sh").parse_args(["plan", *words[1:]])


def test_blocks_are_marked_as_they_can_be() -> None:
    for block in ALL:
        _check_marks(block)


def _check_marks(block: Block) -> None:
    assert block.commands, f"{block.where}: a block of commands without one"
    assert {kind for kind, _ in block.marks} <= {*KINDS}, block.marks
    assert {*block.marked("folder")} <= {*FOLDERS, "goes on"}
    assert all(len(reason.split()) >= 2 for reason in block.marked("not run")), f"{block.where}: why is it not run?"
    for text in block.marked("but not"):
        assert re.fullmatch(r".+ \(.+\)", text), f"{block.where}: which command, and (why)?"
        assert any(command.startswith(text.partition(" (")[0]) for command in block.commands), text
    for name in block.marked("ci"):
        assert f"readme {name}" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    for test in block.marked("run by"):
        assert Path(block.page).name in (ROOT / test).read_text(encoding="utf-8"), f"{block.where}: not run by {test}"
    for page in block.marked("run in"):
        others = [other for other in TO_RUN if other.page == page]
        run = {_bare(command) for other in others for command in other.commands if not other.left_out(command)}
        assert {_bare(command) for command in block.commands} <= run, f"{block.where}: not run in {page}"


def _bare(command: str) -> str:
    return re.sub(r"\s+#.*", "", command)


def test_pages_name_commands_and_options_that_there_are() -> None:
    for block in (block for block in ALL if not block.marked("fails")):
        for words in invocations(block):
            try:
                _parsed(words)
            except (click.ClickException, PipeplanError, SystemExit) as error:
                message = error.format_message() if isinstance(error, click.ClickException) else error
                pytest.fail(f"{block.where}: {shlex.join(words)}: {message}")


def test_sentences_name_commands_and_options_that_there_are() -> None:
    for page in (page for page in pages() if page.name not in WRONG_ON_PURPOSE):
        prose = FENCE.sub("", page.read_text(encoding="utf-8"))
        for text in re.findall(r"`(pipeplan [a-z][^`]*)`", prose):
            words = shlex.split(" ".join(text.replace("\\|", " ").split()))
            try:
                _parsed(words)
            except (click.UsageError, PipeplanError) as error:
                # A sentence may leave out what does not matter to it.
                if isinstance(error, click.NoSuchOption) or re.search("there is no (command|option)", str(error)):
                    pytest.fail(f"{page.name}: {text}: {error}")


def test_no_page_hides_a_command_and_its_python_compiles() -> None:
    """A fence that does not end, or a language that nobody knows, would hide commands."""
    known = {*SHELL, "", "text", "python", "toml", "json", "yaml", "dockerfile", "ini", "csv"}
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert text.count("```") == 2 * len(FENCE.findall(text)), page
        for block in blocks(page):
            assert block.language in known, block.where
            assert block.language in SHELL or not re.search(r"^\$ ", block.text, re.MULTILINE), block.where
        for block in python_blocks(page):
            compile(block.text, block.where, "exec")


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that has all of `FOLDERS`, made once for all processes of the tests."""
    base = tmp_path_factory.getbasetemp()
    shared = (base if worker_id == "master" else base.parent) / "documents"
    shared.mkdir(exist_ok=True)
    with (shared / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (shared / "trained").exists():
            make(shared)
    return shared


def make(shared: Path) -> None:
    """Everything is made in one folder, which stays: plans have the whole path of their model's file."""
    folder = shared / "making"
    folder.mkdir()
    for name, command in FOLDERS.items():
        if name == "model":
            (folder / "my_model.py").write_text(_own_model(), encoding="utf-8")
            (folder / "my-device.toml").write_text(_own_device(), encoding="utf-8")
            shutil.copy(ROOT / "tests" / "docs" / "my_package.py", folder)
        if command:
            ended = _bash(command, folder)
            assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
        shutil.copytree(folder, shared / name)


def _own_model() -> str:
    """The job file that the README shows."""
    return next(block.text for block in python_blocks(ROOT / "README.md") if "def build" in block.text)


def _own_device() -> str:
    """The device file that the page of file formats shows."""
    return next(block.text for block in blocks(ROOT / "docs" / "file-formats.md") if "pipeplan-device" in block.text)


def _bash(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    beside = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{beside}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}
    # A run's folder is named by the time; pages write an ellipsis.
    script = script.replace("/…", "/*")
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=folder,
        env=environment,
        text=True,
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )


def run_page(page: str, made: Path, folder: Path, among: list[Block] = TO_RUN, *, show: bool = False) -> None:
    """Run blocks of a page: each in a folder of its own, unless it goes on in that of the block before it."""
    here = folder / "0"
    beside = [block for block in blocks(ROOT / page) if block.marked("file")]
    for number, block in enumerate(block for block in among if block.page == page):
        kind = next(iter(block.marked("folder")), "trained")
        if kind != "goes on":
            here = folder / str(number)
            shutil.copytree(made / kind, here)
        for file in (file for file in beside if file.line < block.line):
            (here / file.marked("file")[0]).write_text(f"{file.text}\n", encoding="utf-8")
        code = int(next(iter(block.marked("fails")), "0"))
        for command in block.marked("before"):
            ended = _bash(command, here)
            assert ended.returncode == 0, f"{block.where}: {command}\n{ended.stdout}{ended.stderr}"
        for command in (command for command in block.commands if not block.left_out(command)):
            ended = _bash(command, here)
            if show:
                print(f"$ {command}\n{ended.stdout}{ended.stderr}")
            assert ended.returncode == code, f"{block.where}: {command}\n{ended.stdout[-2000:]}{ended.stderr}"


@pytest.mark.site
@pytest.mark.parametrize("page", sorted({block.page for block in TO_RUN}))
def test_the_commands_of_the_page_run(page: str, made: Path, tmp_path: Path) -> None:
    run_page(page, made, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({block.page for block in SLOW}))
def test_the_slow_commands_of_the_page_run(page: str, made: Path, tmp_path: Path) -> None:
    run_page(page, made, tmp_path, SLOW)


@pytest.mark.site
def test_the_python_of_the_pages_runs(made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "trained"
    shutil.copytree(made / "trained", folder)
    script = ["import pipeplan, pipeplan_launch, torch"]
    for block in (block for page in pages() for block in python_blocks(page) if block.runs):
        script.append(f"exec(compile({block.text!r}, {block.where!r}, 'exec'), dict(globals(), __name__='page'))")
    (folder / "blocks.py").write_text("\n".join(script), encoding="utf-8")
    ended = _bash("python blocks.py", folder)
    assert ended.returncode == 0, ended.stderr


def main() -> None:
    """Run pages as the tests do, and show what their commands print."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder)
        for number, page in enumerate(sys.argv[1:]):
            run_page(page, folder, folder / str(number), show=True)


if __name__ == "__main__":
    main()
