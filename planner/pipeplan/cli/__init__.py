"""The command line. Each command is imported only when it is called, so that `--help` and `solve` start quickly.

Only `main` prints errors and decides the exit code; docs/errors.md lists the codes.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys

import click
from click.shell_completion import CompletionItem

from pipeplan._version import __version__
from pipeplan.errors import DisagreementError, PipeplanError
from pipeplan.util.text import did_you_mean, one_line

LONGEST = 1000
"""Largest number of characters of an error message."""
NEAR = 0.6
"""Smallest similarity of a suggested option, as a ratio of `difflib`."""
DONE, FIXABLE, DISAGREED, INTERRUPTED = 0, 2, 3, 130
EXIT_CODES = (
    f"Exit codes: {DONE} done; {FIXABLE} an error that you can fix; {DISAGREED} the solvers disagree, which is a "
    f"defect; {INTERRUPTED} interrupted."
)
START = f"""\
pipeplan {__version__}: the best pipeline for training your model, proven, and run

  pipeplan init        write a job file and a cluster file for this machine
  pipeplan doctor      see what is installed, and what is missing
  pipeplan profile …   measure a job, layer by layer
  pipeplan solve …     find the best plan for a cluster
  ./plan/launch.sh     train with the plan

pipeplan --help lists every command; pipeplan COMMAND --help has examples; pipeplan docs lists the documentation.
"""

# By name: the command's module in `pipeplan.cli`, and its help text. The text is here so that the list imports no
# command.
_COMMANDS = {
    "init": ("commands.init", "Write a starter job file and a cluster file for this machine."),
    "doctor": ("commands.doctor", "Say in plain words what is installed and what is missing."),
    "list": ("commands.list_", "List the bundled models and clusters."),
    "profile": ("profile", "Measure a model, layer by layer, on this machine."),
    "solve": ("commands.solve", "Find the best plan for a cluster, prove it, and write it."),
    "replan": ("commands.replan", "Solve again after a loss, and resume from the last checkpoint."),
    "explain": ("commands.explain", "Explain why a plan is the best one, or why there is none."),
    "sweep": ("commands.sweep", "Solve for many servers, links, memory and microbatch sizes at once."),
    "check": ("commands.check", "Verify a plan's cost, feasibility and proof without the solvers."),
    "simulate": ("commands.simulate", "Replay a plan in simulated time, and draw or trace its timeline."),
    "report": ("commands.report", "Write one HTML page on a plan and a run of it."),
    "export": ("commands.export", "Write scripts for ssh or batch systems, or files of another trainer."),
    "calibrate": ("commands.calibrate", "Write a new profile and cluster file from a run's measurements."),
    "import": ("commands.import_", "Convert a profile of PipeDream."),
    "docs": ("commands.docs", "Print a page of the documentation, or list all pages."),
}


class _Interrupted(Exception):
    """Ctrl-C, wrapped because click would print an empty line for a `KeyboardInterrupt`."""


class _Commands(click.Group):
    def invoke(self, context: click.Context) -> object:
        try:
            return super().invoke(context)
        except KeyboardInterrupt as interrupt:
            raise _Interrupted(*interrupt.args) from None

    def list_commands(self, context: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        module = importlib.import_module(f"pipeplan.cli.{_COMMANDS[name][0]}")
        command = module.command
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not context.resilient_parsing:
            raise PipeplanError(f"there is no command {args[0]!r}; {did_you_mean(args[0], _COMMANDS)}")
        return super().resolve_command(context, args)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:  # `pipeplan help solve`, as in git and docker
            args = [*args[1:], "--help"]
        return super().parse_args(context, args)

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete the names of commands without importing them."""
        matching = [(name, text) for name, (_, text) in _COMMANDS.items() if name.startswith(incomplete)]
        return [CompletionItem(name, help=text) for name, text in matching] + click.Command.shell_complete(
            self, context, incomplete
        )

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    invoke_without_command=True,
    epilog=EXIT_CODES,
)
@click.version_option(__version__, prog_name="pipeplan")
@click.pass_context
def cli(context: click.Context) -> None:
    """Plan pipeline-parallel training: profile a model, solve for your cluster, run the plan.

    \b
    pipeplan init
    pipeplan profile mnist
    pipeplan solve --cluster local --workers 3
    ./plan/launch.sh --epochs 10
    """
    if context.invoked_subcommand is None:
        click.echo(START, nl=False)


def main() -> None:
    """Run the command line and exit."""
    # A stream that the caller has closed is None. Output to it is discarded.
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # print question marks where the encoding lacks a character
            stream.reconfigure(errors="replace")
    try:
        status = cli.main(standalone_mode=False, prog_name="pipeplan")
        sys.stdout.flush()
    except PipeplanError as error:
        _print_error(str(error))
        status = DISAGREED if isinstance(error, DisagreementError) else FIXABLE
    except click.ClickException as error:
        _print_error(_usage_message(error))
        status = FIXABLE
    except (click.Abort, KeyboardInterrupt, _Interrupted) as interrupt:
        if sys.stderr.isatty():
            click.echo(err=True)  # begin a line below the ^C
        _print_error(f"interrupted: {interrupt}" if str(interrupt) else "interrupted")
        status = INTERRUPTED
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            _print_error(f"cannot write the answer: {error.strerror or error}")
            sys.exit(FIXABLE)
        # The reader of our output is gone, as with `| head`, so an error message would be noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status if isinstance(status, int) else 0)


def _print_error(message: str) -> None:
    line = one_line(" ".join(message.split()))
    if len(line) > LONGEST:
        # The message quotes a very long input. The error comes before the quotation, and the remedy after it.
        line = f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"
    click.echo(f"error: {line}", err=True)


def _usage_message(error: click.ClickException) -> str:
    """An error of click in one line that suggests the nearest valid word, or names the help that lists all of them."""
    message = error.format_message().rstrip(".")
    if isinstance(error, click.BadOptionUsage) and "requires an argument" in message:
        return f"{error.option_name} needs a value after it: see --help"
    if not isinstance(error, click.UsageError) or error.ctx is None:
        return message
    path = " ".join(error.ctx.command_path.split())
    if isinstance(error, click.NoSuchOption):
        return f"{path}: there is no option {error.option_name}; {_near_option(error.option_name, error.ctx, path)}"
    if isinstance(error, click.MissingParameter) and error.param is not None:
        return f"{path}: {error.param.make_metavar(error.ctx)} is missing: see {path} --help"
    if isinstance(error, click.BadParameter):
        if error.param is not None and isinstance(error.param.type, click.Choice):
            return _choice_message(error, error.param, error.param.type) or message
        return f"{path}: {message[:1].lower()}{message[1:]}"
    if message.endswith("?"):
        return message
    return f"{path}: {message[:1].lower()}{message[1:]}: see {path} --help"


def _near_option(typed: str, context: click.Context, path: str) -> str:
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


def _choice_message(error: click.BadParameter, parameter: click.Parameter, kind: click.Choice[str]) -> str:
    # Only click's message contains the value that the user gave.
    _, quote, rest = error.message.partition("'")
    typed, separator, _ = rest.partition("' is not ")
    if not quote or not separator:
        return ""
    name = parameter.opts[-1] if isinstance(parameter, click.Option) else str(parameter.human_readable_name)
    return f"{name}: there is no {typed!r}; {did_you_mean(typed, [str(choice) for choice in kind.choices])}"
