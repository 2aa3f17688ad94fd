"""What holds for all commands: options, examples, exit codes, output and completion."""

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
from unittest import mock

import click
import pytest
from click.shell_completion import CompletionItem, ShellComplete
from commandline import Run, refused
from manifests import PIPEDREAM
from repository import ROOT

import pipeplan
from pipeplan import cli as commands
from pipeplan.cli import _COMMANDS, cli, options
from pipeplan.cli.commands.doctor import LACKING
from pipeplan.cli.commands.export import TARGETS
from pipeplan.errors import DisagreementError, InputError
from pipeplan.first_steps import init
from pipeplan.plan.schedules import SCHEDULES
from pipeplan_launch import supervisor
from pipeplan_launch.elastic import restart_state


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
    if line.split()[0] in ("check", "import", "init", "list", "profile", "report", "simulate"):
        again = run(*line.split(), *(["--force"] if "-o" in line or "init" in line else []), "--json", "-q")
        assert (again.code, again.err) == (0, "")
        assert json.loads(again.out)


def test_quiet_keeps_what_is_asked_for_and_errors(run: Run, prepared: Path) -> None:
    script = run("export", "ssh", str(prepared / "plan"), "-o", "-", "-q")
    assert (script.code, script.err, script.out[:2]) == (0, "", "#!")
    refused(run, "solve", "nix.json", "-q")


PAGE = ROOT / "docs" / "errors.md"


def stated(section: str) -> dict[int, str]:
    """The codes of a table of docs/errors.md."""
    text = PAGE.read_text(encoding="utf-8").partition(f"### {section}")[2].partition("\n#")[0]
    return {int(code): meaning for code, meaning in re.findall(r"^\| (\d+) \| (.*) \|$", text, re.MULTILINE)}


ENDS: tuple[tuple[BaseException | None, int], ...] = (
    (None, 0),
    (InputError("x"), 2),
    (click.UsageError("x"), 2),
    (DisagreementError("x"), 3),
    (KeyboardInterrupt(), 130),
    (OSError(28, "No space left on device"), 2),
)


def test_an_end_has_the_code_that_the_page_says(run: Run) -> None:
    for raised, code in ENDS:
        with mock.patch("pipeplan.cli.commands.list_.print_json", side_effect=raised):
            done = run("list", "--json")
        assert done.code == code
        assert code in stated("`pipeplan`")
        assert bool(done.err) == (raised is not None)


def test_the_page_has_all_codes_and_help_ends_with_them(run: Run) -> None:
    mine = [commands.DONE, commands.FIXABLE, commands.DISAGREED, commands.INTERRUPTED]
    assert list(stated("`pipeplan`")) == mine == [0, LACKING, 3, 130]
    assert list(stated("`launch.sh`")) == [0, 1, supervisor.STATUS_REPORTED, supervisor.STATUS_STOPPED]
    assert list(stated("A worker")) == [0, 1, 2, restart_state.STATUS_PEER_LOST, restart_state.STATUS_INTERRUPTED]
    last = " ".join(run("--help").out.split()).partition("Exit codes: ")[2]
    assert [int(code) for code in re.findall(r"(\d+) ", last)] == mine


def test_a_closed_standard_output_is_no_error() -> None:
    command = f"{sys.executable} -m pipeplan list >&-"
    assert subprocess.run(["bash", "-c", command], capture_output=True).returncode == 0


def test_pages_are_listed_with_their_titles_and_printed_as_they_are(run: Run) -> None:
    done = run("docs")
    assert (done.code, str(ROOT / "docs") in done.err) == (0, True)
    listed = {line.split()[0]: line.split(maxsplit=1)[1] for line in done.out.splitlines()}
    pages = ROOT.glob("docs/**/*.md")
    assert set(listed) == {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in pages}
    assert (listed["proof"], listed["reference/cli"]) == ("The proof and the bound", "Command line")
    text = (ROOT / "docs" / "servers.md").read_text(encoding="utf-8")
    for name in ("servers", "docs/servers.md"):
        assert run("docs", name).out == text
    assert refused(run, "docs", "comparson").startswith("there is no page 'comparson'; did you mean 'comparison'")
    refused(run, "docs", "../README")


PROGRAM, VARIABLE = "pipeplan", "_PIPEPLAN_COMPLETE"


def completed(line: str) -> list[CompletionItem]:
    """What a line could go on with, as a shell asks for it; the last word is the one that is begun."""
    *words, begun = line.split(" ")
    return ShellComplete(cli, {}, PROGRAM, VARIABLE).get_completions(words[1:], begun)


def words(line: str) -> set[str]:
    return {str(item.value) for item in completed(line) if item.type == "plain"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `pipeplan init` writes, and a profile."""
    monkeypatch.chdir(tmp_path)
    init.write_starter_files(tmp_path, init.starter_files())
    (tmp_path / "mine.json").write_text("{}")
    return tmp_path


VALUES: dict[str, set[str]] = {
    "pipeplan solve --clu": {"--cluster"},
    "pipeplan solve --cluster ": {"A", "B", "C", "local", "cluster.toml"},
    "pipeplan solve --cluster cl": {"cluster.toml"},
    "pipeplan solve --schedule ": {*SCHEDULES},
    "pipeplan profile --device ": {"cpu", "cuda", "v100", "a100"},
    "pipeplan solve --staleness a": {"any"},
    "pipeplan solve --solver ": {"dp", "ilp", "both"},
    "pipeplan solve ": {"vgg16-v100", "mine.json"},
    "pipeplan explain resnet": {"resnet50-v100"},
    "pipeplan profile ": {"mnist", "vgg16", "show", "diff", "job.py"},
    "pipeplan profile mnist --gran": {"--granularity"},
    "pipeplan profile mnist --granularity ": {"module", "layer", "op"},
    "pipeplan profile --links --dev": {"--device"},
    "pipeplan profile show gnmt": {"gnmt8-v100", "gnmt16-v100"},
    "pipeplan profile diff mine.json vgg": {"vgg16-v100"},
    "pipeplan list ": {"models", "clusters"},
    "pipeplan list clusters c": {"cluster.toml"},
    "pipeplan export ": set(TARGETS),
    "pipeplan docs ser": {"servers"},
}


def test_commands_and_values(folder: Path) -> None:
    found = {item.value: item.help for item in completed("pipeplan ")}
    assert {name: help for name, help in found.items() if name in _COMMANDS} == {
        name: text for name, (_, text) in _COMMANDS.items()
    }
    assert words("pipeplan so") == {"solve"}
    assert words("pipeplan --vers") == {"--version"}
    assert words("pipeplan sovle --") <= {"--help", "--version"}
    for line, some in VALUES.items():
        assert words(line) >= some
        assert all(word.startswith(line.rpartition(" ")[2]) for word in words(line))
    for line in ("solve -o ", "simulate ", "report ", "profile job", "solve --cluster x"):
        assert {item.type for item in completed(f"pipeplan {line}")} & {"file", "dir"}, line


def test_in_bash(folder: Path) -> None:
    """The function that the script defines is called as bash calls it."""
    script = """
    eval "$(_PIPEPLAN_COMPLETE=bash_source pipeplan)"
    registered=$(complete -p pipeplan) || exit 1
    function=$(sed 's/.*-F \\([^ ]*\\).*/\\1/' <<< "$registered")
    COMP_WORDS=(pipeplan solve --cluster cl) COMP_CWORD=3
    "$function" pipeplan cl --cluster 2> /dev/null
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], cwd=folder, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout.split()) == (0, ["cluster.toml"]), done.stderr
