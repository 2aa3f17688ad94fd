"""`pipeplan profile`: measure a model or the links of a cluster, and show or compare profiles.

pipeplan profile MODEL [OPTIONS]      measure (the default), or estimate for a device that this machine lacks
pipeplan profile --links [OPTIONS]    measure the links, and write a cluster file
pipeplan profile show FILE
pipeplan profile diff FILE FILE
"""

from __future__ import annotations

import importlib

import click

from pipeplan.util.text import did_you_mean

_NAMED = ("show", "diff")


class _Profile(click.Group):
    """A group that measures by default: a word that is not the name of a command is a model."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if "--links" in args:
            args = ["links", *(argument for argument in args if argument != "--links")]
        elif not args or args[0] not in _NAMED:
            hint = did_you_mean(args[0], _NAMED) if len(args) > 1 and not args[1].startswith("-") else ""
            if hint.endswith("?") and not context.resilient_parsing:
                # Only options may follow a model, so the word is a misspelt command.
                raise click.UsageError(f"there is no command 'profile {args[0]}'; {hint}")
            args = ["measure", *args]
        return super().parse_args(context, args)

    def get_command(self, context: click.Context, name: str) -> click.Command:
        command = importlib.import_module(f"pipeplan.cli.profile.{name}").command
        assert isinstance(command, click.Command)
        return command

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_NAMED)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # Usage lines show the commands `measure` and `links` under the name of the group.
        return name if name in _NAMED else "", self.get_command(context, name), args[1:]


@click.command("profile", cls=_Profile, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure a model or links, and show or compare profiles."""
