"""`pipeplan export TARGET [PLAN]`: write a script that starts a plan, or the files of another trainer."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipeplan.cli.options import PATH, force_option, output_file, output_folder, plan_profile_option, quiet_option
from pipeplan.cli.output import note, print_file
from pipeplan.errors import InputError
from pipeplan.exports import TARGET_NAMES
from pipeplan.exports.target import ExportTarget, export_files, export_lines, export_target, write_export
from pipeplan.problem import plan_file
from pipeplan.rendering import plan_folder
from pipeplan.rendering.launcher import Launcher, LauncherSetting
from pipeplan.rendering.launchers import LAUNCHERS
from pipeplan.util.text import did_you_mean

TARGETS = (*LAUNCHERS, *TARGET_NAMES)
plan_argument = click.argument("plan", metavar="[PLAN]", type=PATH, default=Path("plan"))


class _Targets(click.Group):
    """A group with one command for each target, which has the options of that target."""

    def list_commands(self, context: click.Context) -> list[str]:
        return list(TARGETS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name in LAUNCHERS:
            return _launcher_command(LAUNCHERS[name])
        if name in TARGET_NAMES:
            return _trainer_command(export_target(name))
        return None

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in TARGETS:
            raise InputError(f"there is no target {args[0]!r}; {did_you_mean(args[0], TARGETS)}")
        return super().resolve_command(context, args)


@click.command("export", cls=_Targets, invoke_without_command=True, subcommand_metavar="TARGET [PLAN]")
@click.pass_context
def command(context: click.Context) -> None:
    """Write PLAN (default: ./plan) for TARGET: a script that starts it over ssh or in a batch system, or the files of
    another trainer.

    Each TARGET has its own options: see `pipeplan export TARGET --help`. A plan that a trainer cannot express is
    refused; `pipeplan solve --for TRAINER` finds the best plan that the trainer can express.

    \b
    pipeplan export ssh
    pipeplan export slurm plan --partition gpu --time 12:00:00
    pipeplan export torch-pipelining
    """
    if context.invoked_subcommand is None:
        raise InputError(f"say what to export the plan for: {', '.join(TARGETS)}")


def _launcher_command(launcher: Launcher) -> click.Command:
    """The command for a script of the launcher's kind."""

    @plan_argument
    @_setting_options(launcher.settings)
    @output_file(note=f"{launcher.file_name} in the plan's folder")
    @force_option
    @quiet_option
    def run(plan: Path, output: Path | None, force: bool, **settings: Any) -> None:
        """Write the script; with `-o -` print it."""
        command_line = shlex.join(["pipeplan", *sys.argv[1:]])
        if output == Path("-"):
            print_file(plan_folder.launch_file_text(plan, launcher, settings, command=command_line))
            return
        path = plan_folder.write_launch_file(plan, launcher, settings, output=output, command=command_line, force=force)
        note(f"written: {path}")

    force = " --force" if launcher.file_name == "launch.sh" else ""  # `pipeplan solve` has written one
    text = f"Write {launcher.file_name}, which launches PLAN: {launcher.title}."
    text += f"\n\n\b\npipeplan export {launcher.name} plan{force}"
    return click.command(launcher.name, help=text, short_help=launcher.title)(run)


def _setting_options(settings: tuple[LauncherSetting, ...]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a command an option for every setting of a launcher."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for setting in reversed(settings):
            default = f"  [default: {setting.default}]" if setting.default not in (None, "", False) else ""
            kind: dict[str, Any] = {"type": click.IntRange(1) if setting.type == "count" else str}
            if setting.type == "flag":
                kind = {"is_flag": True, "default": None}
            name, words = f"--{setting.name.replace('_', '-')}", setting.help + default
            option = click.option(
                name, setting.name, multiple=setting.many, metavar=setting.metavar, help=words, **kind
            )
            function = option(function)
        return function

    return decorate


def _trainer_command(target: ExportTarget) -> click.Command:
    """The command for the files of another trainer."""

    @plan_argument
    @output_folder(note=f"{target.name} in the plan's folder")
    @force_option
    @plan_profile_option
    @quiet_option
    def run(plan: Path, output: Path | None, force: bool, profile_file: Path | None) -> None:
        solved = plan_file.read_plan(plan, profile_file)
        folder = output or plan_file.plan_file(plan).parent / target.name
        files = export_files(target, *solved)
        write_export(folder, files, force=force)
        for line in export_lines(target, folder, files, *solved):
            note(line)

    text = f"Write PLAN for {target.title}, as files that it reads."
    text += f"\n\n\b\npipeplan export {target.name} plan -o {target.name} --force"
    return click.command(target.name, help=text, short_help=target.title)(run)
