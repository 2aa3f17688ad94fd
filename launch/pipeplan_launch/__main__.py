"""`python -m pipeplan_launch PLAN_FOLDER`: one worker of a plan, as torchrun starts it (launch.sh does all that)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeplan_launch.arguments import parser
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.interrupt import Interrupted, catch_signals, die_with_parent

if TYPE_CHECKING:
    from pipeplan_launch.setup import Options

INTERRUPTED = 130


def options_from(arguments: Sequence[str] | None) -> Options:
    """Parse the command line."""
    from pipeplan_launch.setup import Options

    given = parser(prog="python -m pipeplan_launch").parse_args(arguments)
    return Options(
        plan_folder=given.plan_folder,
        epochs=given.epochs,
        resume=given.resume,
        run_dir=given.run_dir,
        seed=given.seed,
        weights=given.weights,
        log_every=given.log_every,
        threads=given.threads,
        checkpoint_every=given.checkpoint_every,
        max_minibatches=given.max_minibatches,
        timeout_s=given.timeout,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one worker; returns the exit status: 0; 2 for an error that was said in one line, 1 if nobody foresaw it; 130
    when interrupted.
    """
    catch_signals()
    options = options_from(arguments)
    from pipeplan_launch import worker

    try:
        worker.run(options)
    except LaunchError as error:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        return 2
    except worker.FailedElsewhere:
        return 2
    except Interrupted as signal:
        # torchrun's own SIGTERM, after an error or Ctrl-C, has been explained already.
        if signal.args == ("SIGINT",) and os.environ.get("RANK", "0") == "0":
            print(f"stopped by {signal}: --resume goes on from the last checkpoint", file=sys.stderr, flush=True)
        return INTERRUPTED
    except worker.Unexpected as error:
        print(f"error: {one_line(error)}", file=sys.stderr, flush=True)
        return 1
    except Exception as error:  # before there is a run folder to keep a traceback in
        from pipeplan_launch.loading import describe

        rank = os.environ.get("RANK", "0")
        print(f"error: something failed unexpectedly (rank {rank}): {describe(error)}", file=sys.stderr, flush=True)
        return 1
    return 0


def one_line(error: BaseException) -> str:
    """Its message without line breaks, whatever names it quotes."""
    return " ".join(str(error).splitlines())


if __name__ == "__main__":
    die_with_parent()  # a worker in a receive would hold its memory and its ports for as long as --timeout
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after an error, tearing down process groups with receives under way can hang or abort.
    os._exit(status)
