"""The command line. Commands are imported when they are called, so that `--help` and `solve` stay quick.

This is the only place that prints an error and decides the exit code: docs/exit-codes.md.
"""

from __future__ import annotations

import importlib
import io
import os
import sys

import click
from click.shell_completion import CompletionItem

from pipeplan import __version__
from pipeplan.cli.misspelt import message_of
from pipeplan.errors import DisagreementError, PipeplanError
from pipeplan.suggest import did_you_mean
from pipeplan.text import one_line

LONGEST = 1000
"""Characters of a complaint."""
DONE, NOT_AS_PROMISED, MENDABLE, DISAGREED, INTERRUPTED = 0, 1, 2, 3, 130
EXIT_CODES = (
    f"Exit codes: {DONE} done; {NOT_AS_PROMISED} `replay --fault`: a fault did not end as promised; {MENDABLE} "
    f"something that you can mend, in one line; {DISAGREED} the solvers disagree, a defect; {INTERRUPTED} interrupted."
)
START = f"""\
pipeplan {__version__}: the best pipeline for training your model, proven, and run

  pipeplan init        write a job file and a cluster file for this machine
  pipeplan doctor      see what is here, and what is missing
  pipeplan profile …   measure a job, layer by layer
  pipeplan solve …     find the best plan for a cluster
  ./plan/launch.sh     train by it

pipeplan --help lists every command; pipeplan COMMAND --help has examples. Documentation: README.md and docs/.
"""

# name: (module, help); the help stands here so that listing the commands imports none of them.
_COMMANDS = {
    "init": ("init", "Write a job file and a cluster file for this machine, to begin with."),
    "doctor": ("doctor", "Say what is here and what is missing, in plain words."),
    "profile": ("profile", "Measure a model, layer by layer, on this machine."),
    "solve": ("solve", "Find the best plan for a cluster, prove it, and write it down."),
    "replan": ("replan", "Solve again for what is left after a loss, and go on from the last checkpoint."),
    "explain": ("explain", "Say why the best plan is what it is, or why there is none."),
    "sweep": ("sweep", "Solve for many clusters at once: servers, links, memory, minibatch."),
    "check": ("check", "Verify a plan's cost, feasibility and proof, without the solvers."),
    "simulate": ("simulate", "Replay a plan in simulated time, and draw it."),
    "trace": ("trace", "Write what was predicted and what was measured as a trace for Perfetto."),
    "report": ("report", "Write one HTML page on a plan and its run."),
    "render": ("render", "Write what starts a plan: over ssh, in a batch system, by a template of yours."),
    "export": ("export", "Tell a plan to another trainer: Megatron-LM, DeepSpeed, torchtitan, torch."),
    "replay": ("replay", "Run a plan on emulated servers of this machine, and compare."),
    "calibrate": ("calibrate", "Write what a run measured into a new profile and cluster."),
    "models": ("models", "List the bundled models."),
    "clusters": ("clusters", "List the bundled clusters."),
    "import": ("importer", "Read another tool's profile."),
    "completion": ("completion", "Print what makes a shell complete pipeplan's words."),
}


class _Interrupted(Exception):
    """Ctrl-C, which click would answer with an empty line, wherever standard error goes."""


class _Commands(click.Group):
    def invoke(self, context: click.Context) -> object:
        try:
            return super().invoke(context)
        except KeyboardInterrupt:
            raise _Interrupted from None

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
            raise click.UsageError(f"there is no command {args[0]!r}; {did_you_mean(args[0], _COMMANDS)}", context)
        return super().resolve_command(context, args)

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:  # as git and docker have it
            args = [*args[1:], "--help"]
        return super().parse_args(context, args)

    def shell_complete(self, context: click.Context, incomplete: str) -> list[CompletionItem]:
        """Without importing any command."""
        found = [(name, text) for name, (_, text) in _COMMANDS.items() if name.startswith(incomplete)]
        return [CompletionItem(name, help=text) for name, text in found] + click.Command.shell_complete(
            self, context, incomplete
        )

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.command(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that has no arrows or dashes gets question marks
            stream.reconfigure(errors="replace")
    try:
        status = cli.main(standalone_mode=False, prog_name="pipeplan")
        sys.stdout.flush()
    except PipeplanError as error:
        _complain(str(error))
        status = DISAGREED if isinstance(error, DisagreementError) else MENDABLE
    except click.ClickException as error:
        _complain(message_of(error))
        status = MENDABLE
    except (click.Abort, KeyboardInterrupt, _Interrupted):
        if sys.stderr.isatty():
            click.echo(err=True)  # below the ^C
        _complain("interrupted")
        status = INTERRUPTED
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            _complain(f"cannot write the answer: {error.strerror or error}")
            sys.exit(MENDABLE)
        # The reader of our output has gone, as `| head` does; nothing is left to say to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status if isinstance(status, int) else 0)


def _complain(message: str) -> None:
    line = one_line(" ".join(message.split()))
    if len(line) > LONGEST:
        # It quotes something of the user's that has no end; what is wrong and what to do stand before and after it.
        line = f"{line[: LONGEST // 2]} … {line[-LONGEST // 2 :]}"
    click.echo(f"error: {line}", err=True)
