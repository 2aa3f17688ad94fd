"""What holds for all commands: the shared options, examples that work, where to start."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest
from commandline import Run, refused
from foreign import PIPEDREAM
from reported import write_run

import pipeplan
from pipeplan import cli as commands
from pipeplan.cli import options
from pipeplan.cli.problem_options import GroupedCommand
from pipeplan.first_steps import init
from pipeplan.problem import plan_file
from pipeplan.report.source import read_report_source

SHARED = {"output": "-o", "force": "--force", "as_json": "--json", "quiet": "-q", "seed": "--seed"}
EXPORTS = "-o --force -q"
MUST = {
    "init": "-o --force --json -q",
    "doctor": "--json -q",
    "profile measure": "-o --force --json -q --seed",
    "profile links": "-o --force --json -q",
    "profile show": "--json -q",
    "profile diff": "--json -q",
    "solve": "-o --force --json -q",
    "replan": "-o --force --json -q",
    "explain": "--json -q --seed",
    "sweep": "--force --json -q",
    "check": "--json -q",
    "simulate": "--force --json -q",
    "report": "-o --force --json -q",
    "export": "",
    "calibrate": "-o --force --json -q",
    "docs": "-q",
    "list": "--json -q",
    "import": "-o --force --json -q",
}
"""The shared options of every command. It writes: -o, and --force where it may refuse. It answers: --json. It draws
numbers: --seed. All targets of `export` have EXPORTS."""
RUN = "plan/runs/20260131T120000Z"
TOO_LONG = (
    "pipeplan profile --links --servers",
    "NODE_RANK=",
    "pipeplan explain --cluster A",
)
"""Minutes, several servers, or much computing: these examples are only parsed here."""
OF_TRANSFORMERS = re.compile("megatron|torchtitan")
"""Of these the tests of exports have models."""


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


def test_commands_have_their_shared_options_in_the_same_words() -> None:
    texts = {"force": options.FORCE, "as_json": options.JSON, "quiet": options.QUIET, "seed": options.SEED}
    for path in every_command():
        own = options_of(path)
        name = path.removeprefix("export ")
        must = MUST[path] if name == path else EXPORTS
        assert {SHARED[name] for name in own if name in SHARED} == set(must.split())
        assert {name: own[name].help for name in texts if name in own} == {n: texts[n] for n in texts if n in own}
        if "output" in own:
            assert own["output"].opts == ["-o", "--output"]
            assert (own["output"].help or "").partition("  [default")[0] in (options.FILE, options.FOLDER)
        for option in own.values():
            sentence, default, _ = (option.help or "").partition("  [default")
            assert sentence.endswith(".") or default, f"{path} {option.opts}: {sentence}"


def test_options_stand_under_headings_and_the_short_help_has_the_essential_ones(run: Run) -> None:
    for path in ("solve", "explain", "sweep", "replan", "profile measure"):
        command = every_command()[path][0]
        assert isinstance(command, GroupedCommand)
        own = {max(option.opts, key=len) for option in options_of(path).values()} - {"-h"} | {"--help"}
        words = path.removesuffix(" measure")
        shown = _sections(run(words, "--help").out)
        for heading, names in command.groups.items():
            assert shown.get(heading, []) == [name for name in names if name in own]
        assert sorted(name for names in shown.values() for name in names) == sorted(own)
        assert (path in ("solve", "profile measure")) is ("Options" not in shown)
        short = _sections(run(words, "-h").out)
        assert {name for names in short.values() for name in names} == own & {*command.essential} < own


def _sections(text: str) -> dict[str, list[str]]:
    """The names of the options under each heading of a help text."""
    sections = re.findall(r"^(\w[\w ]*):\n((?:  .*\n?|\n)+)", text, re.MULTILINE)
    return {heading: re.findall(r"^  (?:-\w, )?(--[\w-]+)", body, re.MULTILINE) for heading, body in sections}


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
    """The files that examples name. In `large`, the plan is for four servers."""
    folder = tmp_path_factory.mktemp("examples")
    init.write_starter_files(folder, init.starter_files())
    profile = pipeplan.read_profile("mnist-v100")
    for name in ("profile.json", "before.json"):
        profile.save(folder / name)
    profile.rescaled(16).save(folder / "after.json")
    for name in ("my-cluster.toml", "lab.toml", "what-is-left.toml"):
        (folder / name).write_text(init.cluster_text(pipeplan.cluster("B").with_servers(1)))
    (folder / "graph.txt").write_text(PIPEDREAM)
    here, quick = pipeplan.cluster("local", workers=3), pipeplan.Settings(solver="dp", simulate=False)
    made = pipeplan.solve(profile, here, settings=quick, allow_copies=False, max_replicas=1, stages=3)
    pipeplan.render(made, folder / "plan")
    write_run(folder / RUN, read_report_source(plan_file.read_plan_document(folder / "plan"), made.problem.profile))
    _add_what_calibration_needs(folder / RUN / "summary.json")
    for name, (cluster, more) in OTHERS.items():
        other = Path(shutil.copytree(folder, folder.with_name(name)))
        shutil.rmtree(other / "plan")
        made = pipeplan.solve(profile, pipeplan.cluster(cluster), settings=quick, **more)
        pipeplan.render(made, other / "plan")
    return folder


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "large": ("A", {"schedule": "1f1b-stashing"}),
    "flush": ("B", {"schedule": "1f1b-flush", "accumulate": 4, "grid": True, "stages": 2}),
}
"""Folders with another plan, for commands that go with such a plan alone."""


def _add_what_calibration_needs(path: Path) -> None:
    summary = json.loads(path.read_text())
    for stage in summary["stages"]:
        stage["measured"] |= {"send_s": 0.0, "other_s": 0.0, "core_wait_s": 0.0, "cpu_s": 0.01}
    path.write_text(json.dumps(summary))


def arranged(example: str, prepared: Path, work: Path) -> Path:
    """A folder in which an example finds what it names, and nothing where it writes."""
    other = "large" if example.startswith("pipeplan replan") else "flush" if " export " in example else prepared.name
    shutil.copytree(prepared.with_name(other), work)
    if "calibrated.json" in example:
        (work / "profile.json").rename(work / "calibrated.json")
        (work / "cluster.toml").rename(work / "calibrated.toml")
    if example.startswith("pipeplan import"):
        (work / "profile.json").unlink()
    if re.match(r"pipeplan (solve|init)", example):
        shutil.rmtree(work / "plan")
        (work / "job.py").unlink()
        (work / "cluster.toml").unlink(missing_ok=True)
    return work


@pytest.mark.slow
@pytest.mark.parametrize(
    "example", [one for one in examples() if not one.startswith(TOO_LONG) and not OF_TRANSFORMERS.search(one)]
)
def test_an_example_works(example: str, prepared: Path, tmp_path: Path) -> None:
    work = arranged(example, prepared, tmp_path / "work")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        example, shell=True, cwd=work, capture_output=True, text=True, env=os.environ | {"PATH": path}, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "error" not in done.stderr


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
    "import graph.txt --microbatch 4 -o imported.json --force",
    "list",
    "init new",
)


@pytest.mark.parametrize("line", ANSWERS)
def test_quiet_prints_nothing(line: str, run: Run, prepared: Path, tmp_path: Path) -> None:
    """A table, a list and a note alike; the exit code and the files are the answer."""
    shutil.copytree(prepared.with_name("large"), tmp_path, dirs_exist_ok=True)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert run(*line.split(), "-q") == (0, "", "")
    written = {path.name for path in tmp_path.rglob("*") if before.get(path) != path.stat().st_mtime_ns}
    assert "-o" not in line or line.partition("-o ")[2].split()[0] in written


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


def test_json_is_one_document_and_quiet_keeps_it_and_errors(run: Run, prepared: Path) -> None:
    shutil.copytree(prepared, Path(), dirs_exist_ok=True)
    asked = ("list", "list models", "list clusters", "init begun", "profile show mnist-v100")
    solved = "solve mnist-v100 --cluster C --solver dp -o new"
    for line in (*asked, solved, "import graph.txt --microbatch 4 -o imported.json"):
        done = run(*line.split(), "--json", "-q")
        assert (done.code, done.err) == (0, "")
        assert json.loads(done.out)
    script = run("export", "ssh", "plan", "-o", "-", "-q")
    assert (script.code, script.err, script.out[:2]) == (0, "", "#!")
    refused(run, "solve", "nix.json", "-q")
