"""The command line. Commands are imported when they are called, so that `--help` and `solve` stay quick.

This is the only place that prints an error and decides the exit code: 0 done, 2 something the user can mend,
3 the solvers disagree (a defect of pipeplan), 130 interrupted.
"""

from __future__ import annotations

import importlib
import os
import sys

import click

from pipeplan import __version__
from pipeplan.errors import DisagreementError, PipeplanError
from pipeplan.suggest import did_you_mean
from pipeplan.text import one_line

LONGEST = 1000
"""Characters of a complaint."""

# name: (module, help); the help stands here so that listing the commands imports none of them.
_COMMANDS = {
    "profile": ("profile", "Measure a model, layer by layer, on this machine."),
    "solve": ("solve", "Find the best plan for a cluster, prove it, and write it down."),
    "replan": ("replan", "Solve again for what is left after a loss, and go on from the last checkpoint."),
    "explain": ("explain", "Say why the best plan is what it is, or why there is none."),
    "sweep": ("sweep", "Solve for many clusters at once: servers, links, memory, minibatch."),
    "check": ("check", "Verify a plan's cost, feasibility and proof, without the solvers."),
    "simulate": ("simulate", "Replay a plan in simulated time, and draw it."),
    "trace": ("trace", "Write what was predicted and what was measured as a trace for Perfetto."),
    "report": ("report", "Write one HTML page on a plan and its run."),
    "export": ("export", "Tell a plan to another trainer: Megatron-LM, DeepSpeed, torchtitan, torch."),
    "replay": ("replay", "Run a plan on emulated servers of this machine, and compare."),
    "calibrate": ("calibrate", "Write what a run measured into a new profile and cluster."),
    "reproduce": ("reproduce", "Put published results beside predictions, and replay them."),
    "models": ("models", "List the bundled models."),
    "clusters": ("clusters", "List the bundled clusters."),
    "import": ("importer", "Read another tool's profile."),
}


class _Commands(click.Group):
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
        if args and args[0] not in _COMMANDS:
            raise click.UsageError(f"there is no command {args[0]!r}; {did_you_mean(args[0], _COMMANDS)}", context)
        return super().resolve_command(context, args)

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pipeplan")
def cli() -> None:
    """Plan pipeline-parallel training: profile a model, solve for your cluster, run the plan.

    \b
    pipeplan profile mnist
    pipeplan solve --cluster local --workers 3
    ./plan/launch.sh --epochs 10
    """


def main() -> None:
    """Run the command line and exit."""
    try:
        status = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except PipeplanError as error:
        _complain(str(error))
        status = 3 if isinstance(error, DisagreementError) else 2
    except click.ClickException as error:
        _complain(error.format_message())
        status = 2
    except (click.Abort, KeyboardInterrupt):
        _complain("interrupted")
        status = 130
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            _complain(f"cannot write the answer: {error.strerror or error}")
            sys.exit(2)
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
