"""`pipeplan render`: write the launch script of a plan for one machine, ssh, or a batch system."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pipeplan.cli.shared.options import force_option, output_file, quiet_option
from pipeplan.cli.shared.output import note, print_file, print_json, print_line
from pipeplan.errors import InputError
from pipeplan.rendering import plan_folder
from pipeplan.rendering.launcher import Launcher, LauncherSetting
from pipeplan.rendering.launchers import LAUNCHERS, launcher_by_name

OWN = "own"
"""The name of the hidden command that renders the user's template without a kind."""
PLAN = click.Argument(["plan"], metavar="[PLAN]", type=click.Path(path_type=Path), default=Path("plan"), required=False)


@dataclass(frozen=True)
class _Output:
    """The options that all kinds have beside their own settings."""

    output: Path | None
    force: bool
    template: Path | None


class _Kinds(click.Group):
    """A group with one command for each kind, which has the options of that kind."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(LAUNCHERS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name == OWN:
            return _own_command()
        return _command_of(LAUNCHERS[name]) if name in LAUNCHERS else None

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        # `--template FILE [PLAN]` without a kind runs the hidden command.
        if any(word.partition("=")[0] == "--template" for word in args) and not any(w in LAUNCHERS for w in args):
            args = [OWN, *args]
        return super().parse_args(context, args)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in (*LAUNCHERS, OWN):
            launcher_by_name(args[0])
        return super().resolve_command(context, args)


@click.command("render", cls=_Kinds, invoke_without_command=True, subcommand_metavar="KIND [PLAN]")
@click.option("--list", "listed", is_flag=True, help="List the kinds with the files that they write.")
@click.option("--json", "as_json", is_flag=True, help="With --list: as one JSON document.")
@click.pass_context
def command(context: click.Context, listed: bool, as_json: bool) -> None:
    """Render a script that launches PLAN (default: ./plan) over ssh, in a batch system, or by your own template.

    Each KIND has options of its own: see `pipeplan render KIND --help`. With --template FILE, your own jinja2 template
    is rendered instead of the bundled one, with or without a KIND.

    \b
    pipeplan render --list
    pipeplan render ssh
    pipeplan render slurm plan --partition gpu --time 12:00:00
    pipeplan render --template mine.sh.j2 plan -o start.sh
    """
    if listed:
        _list(as_json)
    elif context.invoked_subcommand is None:
        raise InputError(f"say what to render: {', '.join(LAUNCHERS)}, or --template FILE")


def _command_of(kind: Launcher) -> click.Command:
    def run(plan: Path, output: Path | None, force: bool, template: Path | None, **options: Any) -> None:
        settings = {name: value for name, value in options.items() if value is not None}
        _render(kind, plan, settings, _Output(output, force, template))

    force = " --force" if kind.file_name == "launch.sh" else ""  # `pipeplan solve` has written one
    text = f"Render {kind.file_name}, which launches PLAN: {kind.title}."
    text += f"\n\n\b\npipeplan render {kind.name} plan{force}"
    note = f"{kind.file_name} in the plan's folder"
    rendering_command = click.command(kind.name, help=text, short_help=kind.title)(quiet_option(run))
    return _with_shared_options(rendering_command, kind.settings, note)


def _own_command() -> click.Command:
    @click.option(
        "--set",
        "assigned",
        multiple=True,
        metavar="NAME=VALUE",
        help="Set a variable of the template. Can be repeated.",
    )
    @quiet_option
    def run(plan: Path, output: Path | None, force: bool, template: Path | None, assigned: tuple[str, ...]) -> None:
        pairs = [assignment.partition("=") for assignment in assigned]
        for name, equals, _ in pairs:
            if not equals or not name.isidentifier():
                raise InputError(f"--set takes NAME=VALUE, not {name + equals!r}")
        settings = {name: value for name, _, value in pairs}
        _render(None, plan, settings, _Output(output, force, template))

    note = "the template's name without .j2, in the plan's folder"
    rendering_command = click.command(OWN, help="Render your own template.", hidden=True)(run)
    return _with_shared_options(rendering_command, (), note)


def _with_shared_options(
    rendering_command: click.Command, settings: Sequence[LauncherSetting], note: str
) -> click.Command:
    template = click.Option(
        ["--template"], type=click.Path(path_type=Path), metavar="FILE", help="Render your own jinja2 template."
    )
    rendering_command.params[:0] = [PLAN, *map(_option, settings)]
    rendering_command.params += [template]
    force_option(output_file(note=note)(rendering_command))
    return rendering_command


def _option(setting: LauncherSetting) -> click.Option:
    name = f"--{setting.name.replace('_', '-')}"
    if setting.type == "flag":
        return click.Option([name, setting.name], is_flag=True, default=None, help=setting.help)
    note = f"  [default: {setting.default}]" if setting.default not in (None, "") else ""
    return click.Option(
        [name, setting.name],
        type=click.IntRange(1) if setting.type == "count" else str,
        multiple=setting.many,
        metavar=setting.metavar,
        help=setting.help + note,
    )


def _render(kind: Launcher | None, plan: Path, settings: dict[str, Any], options: _Output) -> None:
    template, to_screen = options.template, options.output == Path("-")
    path = plan_folder.launch_file_path(plan, kind, template, None if to_screen else options.output)
    text = plan_folder.launch_file_text(plan, kind, settings, template=template, output=path, command=_command_line())
    if to_screen:
        print_file(text)
        return
    plan_folder.write_launch_file(path, text, kind, template, force=options.force)
    note(f"written: {path}")


def _command_line() -> str:
    """The command that is running, quoted for a shell."""
    return shlex.join(["pipeplan", *sys.argv[1:]])


def _list(as_json: bool) -> None:
    if as_json:
        kinds = [
            {"name": launcher.name, "title": launcher.title, "file": launcher.file_name}
            for launcher in LAUNCHERS.values()
        ]
        print_json(kinds, indent=None, ascii_only=True)
        return
    names, files = (
        max(map(len, column)) for column in (LAUNCHERS, [launcher.file_name for launcher in LAUNCHERS.values()])
    )
    for one in LAUNCHERS.values():
        print_line(f"{one.name:{names}}  {one.file_name:{files}}  {one.title}")
