"""`pipeplan profile`: measure a model or the links of a cluster, and look at profiles.

pipeplan profile MODEL [OPTIONS]      measure (the default), or estimate for a device that is not here
pipeplan profile --links [OPTIONS]    measure the links, and write a cluster file
pipeplan profile show FILE
pipeplan profile diff FILE FILE
"""

from __future__ import annotations

import importlib

import click

from pipeplan.suggest import did_you_mean

_NAMED = ("show", "diff")


class _Profile(click.Group):
    """What follows `profile` is a model unless it is the name of one of its own commands."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if "--links" in args:
            args = ["links", *(one for one in args if one != "--links")]
        elif not args or args[0] not in _NAMED:
            hint = did_you_mean(args[0], _NAMED) if len(args) > 1 and not args[1].startswith("-") else ""
            if hint.endswith("?") and not context.resilient_parsing:
                # A model is followed by options alone.
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
        # In usage lines the two that are not named are the command itself.
        return name if name in _NAMED else "", self.get_command(context, name), args[1:]


@click.command("profile", cls=_Profile, context_settings={"help_option_names": ["-h", "--help"]})
def command() -> None:
    """Measure a model or links; look at profiles."""
