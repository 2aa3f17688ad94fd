"""`python -m pipeplan_launch PLAN_FOLDER`: one worker of a plan. launch.sh starts torchrun, which starts workers."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from pipeplan_launch.command_line import averaging_options, compile_backend, staleness_options, worker_parser
from pipeplan_launch.elastic import restart_state
from pipeplan_launch.elastic.signals import Interrupted, catch_signals, die_with_parent, launcher_pid
from pipeplan_launch.errors import LaunchError, PeerLost, print_status

if TYPE_CHECKING:
    from pipeplan_launch.runtime.stage_setup import RunOptions

INTERRUPTED = restart_state.STATUS_INTERRUPTED


def options_from(arguments: Sequence[str] | None) -> RunOptions:
    """Parse the command line."""
    from pipeplan_launch.runtime.stage_setup import RunOptions

    parsed = worker_parser(prog="python -m pipeplan_launch").parse_args(arguments)
    return RunOptions(
        plan_folder=parsed.plan_folder,
        epochs=parsed.epochs,
        resume=parsed.resume,
        run_dir=parsed.run_dir,
        seed=parsed.seed,
        weights=parsed.weights,
        self_check=not parsed.no_self_check,
        log_every=parsed.log_every,
        threads=parsed.threads,
        checkpoint_every=parsed.checkpoint_every,
        checkpoint_minibatches=parsed.checkpoint_minibatches,
        evaluate_every=parsed.evaluate_every,
        resume_from=parsed.resume_from,
        max_minibatches=parsed.max_minibatches,
        stop_on_nan=parsed.on_nan == "stop",
        timeout_s=parsed.timeout,
        probe_s=parsed.probe,
        averaging=averaging_options(parsed),
        staleness=staleness_options(parsed),
        transport=parsed.transport,
        compile_backend=compile_backend(parsed),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one worker; returns the exit status.

    0: the worker is done. 1: an unforeseen error. 2: an error that was reported in one line. 3: a fault after which all
    workers are restarted. 130: the worker was interrupted.
    """
    final_status = restart_state.final_status()
    if final_status is not None:
        return final_status  # the previous attempt has printed the reason
    catch_signals()
    options = options_from(arguments)
    from pipeplan_launch import worker
    from pipeplan_launch.elastic import process_groups
    from pipeplan_launch.elastic.process_groups import FailedElsewhere
    from pipeplan_launch.elastic.rendezvous import LaunchOver

    try:
        worker.run_worker(options)
    except PeerLost as error:
        if process_groups.will_restart():
            process_groups.announce_end(fault=one_line(error))
            return restart_state.STATUS_PEER_LOST
        status = _end(2, f"error: {one_line(error)}")
    except LaunchError as error:
        status = _end(2, f"error: {one_line(error)}")
    except (FailedElsewhere, LaunchOver):
        status = _end(2)
    except Interrupted as signal:
        if restart_state.has_launcher() and restart_state.stop_signal() is None:
            process_groups.announce_end()
            return restart_state.STATUS_PEER_LOST  # torchrun sends this SIGTERM when another worker has ended
        # A launcher prints this line itself; without one, a SIGTERM comes from torchrun.
        prints = not restart_state.has_launcher() and signal.args == ("SIGINT",) and os.environ.get("RANK", "0") == "0"
        status = _end(
            INTERRUPTED, f"stopped by {signal}: --resume continues from the last checkpoint, if there is one" * prints
        )
    except worker.UnexpectedError as error:
        status = _end(1, f"error: {one_line(error)}")
    except Exception as error:  # no run folder exists yet for the traceback
        from pipeplan_launch.job.user_code import describe_error

        rank = os.environ.get("RANK", "0")
        status = _end(1, f"error: something failed unexpectedly (rank {rank}): {describe_error(error)}")
    else:
        return 0
    process_groups.announce_end(over=True)
    return status


def _end(status: int, line: str = "") -> int:
    """Print the line, and rule out any further attempt."""
    if line:
        print_status(line)
    restart_state.record_final_status(status)
    return status


def one_line(error: BaseException) -> str:
    """The error's message on one line. Names that it quotes may contain line breaks."""
    return " ".join(str(error).splitlines())


if __name__ == "__main__":
    gc.disable()  # imported modules are never garbage; `stage_setup` enables it again when the stage is built
    die_with_parent(
        launcher_pid()
    )  # a worker that waits for a message would keep its memory and ports for as long as --timeout
    status = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    # sys.exit would tear down the process groups, which can hang or abort after an error while receives are posted.
    os._exit(status)
