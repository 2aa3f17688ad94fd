"""What holds for all commands: the shared options, examples that work, where to start."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from unittest import mock

import click
import pytest
from commandline import Run, refused
from manifests import PIPEDREAM

import pipeplan
from pipeplan import cli as commands
from pipeplan.cli import options


@cache
def every_command() -> dict[str, tuple[click.Command, click.Context]]:
    """Every command by the words after `pipeplan`, in its context."""
    return dict(_walk(click.Context(commands.cli, info_name="pipeplan"), ""))


def _walk(context: click.Context, path: str) -> Iterator[tuple[str, tuple[click.Command, click.Context]]]:
    command = context.command
    if path and path != "profile":
        yield path, (command, context)
    if isinstance(command, click.Group):
        for name in [*command.list_commands(context), *(("measure", "links") if path == "profile" else ())]:
            found = command.get_command(context, name)
            assert found is not None
            yield from _walk(click.Context(found, parent=context, info_name=name), f"{path} {name}".strip())


def options_of(path: str) -> dict[str, click.Option]:
    return {str(one.name): one for one in every_command()[path][0].params if isinstance(one, click.Option)}


def examples() -> list[str]:
    found = [commands.cli.help or "", *(command.help or "" for command, _ in every_command().values())]
    lines = [line.strip() for text in found for line in text.splitlines()]
    return list(dict.fromkeys(line for line in lines if re.match(r"([A-Z_]+=\S+ )*pipeplan( |$)", line)))


def test_commands_have_their_shared_options_in_the_same_words(run: Run) -> None:
    texts = {"force": options.FORCE, "as_json": options.JSON, "quiet": options.QUIET, "seed": options.SEED}
    for path in every_command():
        own = options_of(path)
        must = {"quiet"} if path == "docs" or path.startswith("export ") else {"quiet", "as_json"}
        assert {*own} >= (set() if path == "export" else must), path
        assert {name: own[name].help for name in texts if name in own} == {n: texts[n] for n in texts if n in own}
        if "output" in own:
            assert own["output"].opts == ["-o", "--output"]
            assert (own["output"].help or "").partition("  [default")[0] in (options.FILE, options.FOLDER)
    for path in ("solve", "explain", "sweep", "replan", "profile"):
        short, whole = (set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", run(path, h).out, re.M)) for h in ("-h", "--help"))
        assert short < whole, "the short help has the essential options"


def test_commands_say_what_they_do_and_have_examples_that_there_are() -> None:
    for path, (command, context) in every_command().items():
        text = command.get_help(context)
        name = {"profile measure": "profile", "profile links": "profile --links"}.get(path, path)
        assert re.search(rf"^  (?:[A-Z_]+=\S+ )*pipeplan {name}\b", text, re.MULTILINE), text
    with mock.patch.object(click.Command, "invoke"), mock.patch.object(click.Group, "invoke", _invoke_inner):
        for example in examples():
            words = shlex.split(re.sub(r"^([A-Z_]+=\S+ )*", "", example))
            commands.cli.main(words[1:], prog_name="pipeplan", standalone_mode=False)


def _invoke_inner(group: click.Group, context: click.Context) -> None:
    """Have the words of the command inside parsed, and call nothing."""
    words = [*context._protected_args, *context.args]
    if words:
        name, command, rest = group.resolve_command(context, words)
        assert command is not None
        with command.make_context(name, rest, parent=context) as inner:
            command.invoke(inner)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan for four servers, and a profile of another tool."""
    folder = tmp_path_factory.mktemp("prepared")
    (folder / "graph.txt").write_text(PIPEDREAM)
    profile, quick = pipeplan.read_profile("mnist-v100"), pipeplan.Settings(solver="dp", simulate=False)
    made = pipeplan.solve(profile, pipeplan.cluster("A"), settings=quick, schedule="1f1b-stashing")
    pipeplan.render(made, folder / "plan")
    return folder


ANSWERS = (
    "solve mnist-v100 --cluster C --solver dp -o new",
    "replan plan --lost server3 --solver dp -o new",
    "explain mnist-v100 --cluster C --samples 0",
    "sweep mnist-v100 --cluster C --servers 2 --jobs 1",
    "check plan",
    "simulate plan --trace trace.json",
    "report plan -o report.html",
    "export ssh plan -o new.sh",
    "profile show mnist-v100",
    "profile diff mnist-v100 mnist-v100",
    "import graph.txt --microbatch 4 -o imported.json",
    "list",
    "init new",
)


def test_help_imports_nothing_that_is_slow() -> None:
    """Their time is mostly that of imports, which a test can count without a clock."""
    slow = {"--help": "msgspec numpy pulp rich jinja2 torch", "solve --help": "pulp highspy jinja2 torch pipeplan.api"}
    for line, modules in slow.items():
        code = (
            f"import sys\nfrom pipeplan.cli import main\nsys.argv = ['pipeplan', *{line.split()}]\ntry:\n    main()\n"
        )
        code += f"finally:\n    print(*{set(modules.split())} & set(sys.modules), file=sys.stderr)"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stderr.strip() == "", line


def test_alone_it_says_where_to_start_and_help_may_be_asked_for_first(run: Run) -> None:
    done = run()
    assert (done.code, done.err, done.out.count("\n") <= 12) == (0, "", True)
    for word in ("init", "doctor", "profile", "solve", "launch.sh", "docs"):
        assert word in done.out
    assert run("help", "solve").out == run("solve", "--help").out
    assert run("help").out == run("--help").out


@pytest.mark.parametrize("line", ANSWERS)
def test_quiet_prints_nothing_and_json_is_one_document(line: str, run: Run, prepared: Path, tmp_path: Path) -> None:
    """A table, a list and a note alike; the exit code and the files are the answer."""
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert run(*line.split(), "-q") == (0, "", "")
    written = {path.name for path in tmp_path.rglob("*") if before.get(path) != path.stat().st_mtime_ns}
    assert "-o" not in line or line.partition("-o ")[2].split()[0] in written
    if "as_json" in options_of(" ".join(line.split()[: 2 if line.startswith(("profile", "export")) else 1])):
        again = run(*line.split(), *(["--force"] if "-o" in line or "init" in line else []), "--json", "-q")
        assert (again.code, again.err) == (0, "")
        assert json.loads(again.out)


def test_quiet_keeps_what_is_asked_for_and_errors(run: Run, prepared: Path) -> None:
    script = run("export", "ssh", str(prepared / "plan"), "-o", "-", "-q")
    assert (script.code, script.err, script.out[:2]) == (0, "", "#!")
    refused(run, "solve", "nix.json", "-q")
