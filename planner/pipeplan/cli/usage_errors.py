"""One-line messages for unknown options, values and arguments, which suggest the nearest valid ones."""

from __future__ import annotations

import difflib
import sys

import click

from pipeplan.util.text import did_you_mean

NEAR = 0.6
"""Smallest similarity of a suggested option, as a ratio of `difflib`."""


def usage_message(error: click.ClickException) -> str:
    """An error of click in one line that suggests the nearest valid word, or names the help that lists all of them."""
    message = error.format_message().rstrip(".")
    if isinstance(error, click.BadOptionUsage) and "requires an argument" in message:
        return f"{error.option_name} needs a value after it: see --help"
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return message
    path = " ".join(error.ctx.command_path.split())
    if isinstance(error, click.NoSuchOption):
        return f"{path}: there is no option {error.option_name}; {_near(error.option_name, error.ctx, path)}"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return f"{path}: {error.param.make_metavar(error.ctx)} is missing: see {path} --help"
    if isinstance(error, click.BadParameter):
        if error.param is not None and isinstance(error.param.type, click.Choice):
            return _choice(error, error.param, error.param.type) or message
        return f"{path}: {message[:1].lower()}{message[1:]}"
    if message.endswith("?"):
        return message
    return f"{path}: {message[:1].lower()}{message[1:]}: see {path} --help"


def _near(typed: str, context: click.Context, path: str) -> str:
    options = [param for param in context.command.get_params(context) if isinstance(param, click.Option)]
    known = {name.lstrip("-"): name for option in options for name in option.opts if name.startswith("--")}
    if owner := _owner(typed, context):
        return f"it is one of {owner}: write pipeplan {owner} {typed}"
    near = difflib.get_close_matches(typed.lstrip("-").lower(), known, n=2, cutoff=NEAR)
    return f"did you mean {' or '.join(known[name] for name in near)}?" if near else f"{path} --help lists its options"


def _owner(typed: str, context: click.Context) -> str | None:
    """The command that has this option, if the user wrote the option before the command's name."""
    group = context.command
    if context.parent is not None or not isinstance(group, click.Group):
        return None
    named = next((word for word in sys.argv[1:] if word in group.list_commands(context)), None)
    command = None if named is None else group.get_command(context, named)
    has_option = command is not None and any(typed in param.opts for param in command.params)
    return named if has_option else None


def _choice(error: click.BadParameter, parameter: click.Parameter, kind: click.Choice[str]) -> str:
    # Only click's message contains the value that the user gave.
    _, quote, rest = error.message.partition("'")
    typed, separator, _ = rest.partition("' is not ")
    if not quote or not separator:
        return ""
    name = parameter.opts[-1] if isinstance(parameter, click.Option) else str(parameter.human_readable_name)
    return f"{name}: there is no {typed!r}; {did_you_mean(typed, [str(choice) for choice in kind.choices])}"
