"""The command line of a run. Torch-free."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NoReturn, TypeVar

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.run_options import (
    AUTO,
    MODES,
    GradientAveraging,
    StalenessOptions,
    parse_compression,
    parse_significance,
)
from pipeplan_launch.plan.stage_files import CORRECTIONS

T = TypeVar("T")


class OptionParser(argparse.ArgumentParser):
    """Reports a wrong option in one line, with the most similar option that exists."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        line = message.removeprefix("argument ") if unknown is None else self._unknown(unknown[1])
        print(f"error: {self.prog}: {' '.join(line.split())}", file=sys.stderr)
        sys.exit(2)

    def _unknown(self, option: str) -> str:
        if not option.startswith("-"):
            return f"{option!r} follows no option that takes it: see --help"
        known = [name for name in self._option_string_actions if name.startswith("--")]
        near = difflib.get_close_matches(option.partition("=")[0], known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "see --help"
        return f"there is no option {option}; {hint}"


def worker_parser(prog: str) -> argparse.ArgumentParser:
    """The parser of a worker's options. launch.sh takes the same options and passes them on."""
    parser = OptionParser(
        prog=prog,
        description="Run a plan. The launch.sh in the plan folder starts all workers, and passes these options on.",
    )
    _add_start_options(parser)
    _add_running_options(parser)
    _add_staleness_options(parser)
    _add_communication_options(parser)
    return parser


def _add_start_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan_folder", type=Path, metavar="PLAN_FOLDER", help="folder that `pipeplan solve` wrote")
    parser.add_argument(
        "--epochs",
        type=whole_number_between(1),
        metavar="N",
        help="number of epochs in all (10); for inference, number of passes (1)",
    )
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument(
        "--resume-from", type=Path, metavar="D", help="go on from this checkpoint or run, in a new run folder"
    )
    parser.add_argument("--run-dir", type=Path, metavar="D", help="run folder (PLAN_FOLDER/runs/<UTC time>)")
    parser.add_argument(
        "--seed",
        type=whole_number_between(0),
        metavar="N",
        help="seed of the weights, the order of samples and dropout (0)",
    )
    parser.add_argument("--weights", type=Path, metavar="D", help="begin with the weights of this checkpoint or run")
    parser.add_argument(
        "--no-self-check",
        action="store_true",
        help="do not compare two training steps of the model alone with those of the plan's stages first",
    )


def _add_running_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log-every",
        type=whole_number_between(0),
        default=20,
        metavar="N",
        help="minibatches between two log lines; 0: none (20)",
    )
    parser.add_argument(
        "--threads", type=whole_number_between(1, 4096), metavar="N", help="torch threads per worker (OMP_NUM_THREADS)"
    )
    parser.add_argument(
        "--checkpoint-every",
        type=whole_number_between(1),
        default=1,
        metavar="N",
        help="epochs between two checkpoints (1)",
    )
    parser.add_argument(
        "--checkpoint-minibatches",
        type=whole_number_between(1),
        metavar="N",
        help="also write a checkpoint every N minibatches of an epoch (none)",
    )
    parser.add_argument(
        "--evaluate-every",
        type=whole_number_between(1),
        default=1,
        metavar="N",
        help="epochs between two evaluations (1); the last epoch is always evaluated",
    )
    parser.add_argument(
        "--max-minibatches",
        type=whole_number_between(1),
        metavar="N",
        help="run only the first N minibatches of every epoch",
    )
    parser.add_argument(
        "--on-nan",
        choices=("stop", "warn"),
        default="stop",
        help="what to do after a loss that is not finite: stop, or warn and train on (stop)",
    )
    parser.add_argument(
        "--restarts",
        type=whole_number_between(0),
        default=3,
        metavar="N",
        help="maximum number of restarts after faults (3)",
    )

    parser.add_argument(
        "--compile",
        action="store_true",
        help="compile every stage by torch.compile; results then differ in the last bits from those without",
    )
    parser.add_argument(
        "--compile-backend", metavar="NAME", help="compile every stage by this backend of torch.compile (inductor)"
    )


def compile_backend(parsed: argparse.Namespace) -> str | None:
    """The backend of torch.compile on a parsed command line; None if nothing is to be compiled."""
    return parsed.compile_backend or ("inductor" if parsed.compile else None)


def _add_staleness_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--correction",
        choices=CORRECTIONS,
        help="correct updates from old gradients: ef (error feedback) or none (as the plan says)",
    )
    parser.add_argument(
        "--force-correction", action="store_true", help="correct them also where it harms: SGD without momentum"
    )
    parser.add_argument(
        "--flush-epochs",
        type=whole_number_between(0),
        default=0,
        metavar="N",
        help="drain the pipeline before every update in the first N epochs (0)",
    )


def staleness_options(parsed: argparse.Namespace) -> StalenessOptions:
    """The options about old gradients on a parsed command line."""
    return StalenessOptions(parsed.correction, parsed.force_correction, parsed.flush_epochs)


def averaging_options(parsed: argparse.Namespace, plan: LaunchPlan | None = None) -> GradientAveraging:
    """The options about averaging among the replicas of a stage on a parsed command line; the plan gives defaults."""
    averaging = GradientAveraging(parsed.compress, parsed.significance, parsed.shard_optimizer)
    return averaging if plan is None else averaging.by_default_of(plan)


def _add_communication_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--shard-optimizer",
        action=argparse.BooleanOptionalAction,
        help="divide the optimiser's state and step among the replicas of each stage, ZeRO stage 1 (as the plan says)",
    )
    averaging = parser.add_mutually_exclusive_group()
    averaging.add_argument(
        "--compress",
        type=_parsed_by(parse_compression),
        metavar="HOW",
        help="compress gradients among replicas: bf16, powersgd or powersgd:RANK (no compression)",
    )
    averaging.add_argument(
        "--significance",
        type=_parsed_by(parse_significance),
        metavar="V%",
        help="between servers, send only updates above V%% of the weight",
    )
    parser.add_argument(
        "--transport",
        choices=(AUTO, *MODES),
        default=AUTO,
        help="how messages travel between stages: by Gloo from the host's memory, or by NCCL (auto: what the self-test "
        "has found on this machine, else gloo)",
    )
    parser.add_argument(
        "--no-selftest",
        action="store_true",
        help="do not try first how messages travel between the GPUs of this machine",
    )
    parser.add_argument(
        "--probe",
        type=partial(_seconds, least=0, most=600, meaning=" from 0 (no probe) to 600"),
        default=2.0,
        metavar="S",
        help="seconds for measuring the links between servers before training; 0: do not measure (2)",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=600.0,
        metavar="S",
        help="maximum number of seconds to wait for another worker (600)",
    )


def check_start_options(resume: bool, resume_from: Path | None, weights: Path | None, *, trains: bool) -> None:
    """Raise `LaunchError` if the options name more than one start of a run, or a resumption of an inference run."""
    options = {"--resume": resume, "--resume-from": resume_from, "--weights": weights}
    chosen = [name for name, value in options.items() if value]
    if len(chosen) > 1:
        raise LaunchError(f"{' and '.join(chosen)} exclude each other: a run begins from one of them")
    if not trains and (resume or resume_from is not None):
        raise LaunchError(f"an inference run cannot be resumed: give --weights in place of {chosen[0]}")


def _parsed_by(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`parse`, whose `ValueError` becomes an error that argparse reports with the same message."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def whole_number_between(least: int, most: int = 2**63 - 1) -> Callable[[str], int]:
    """The type of an option that takes a whole number from `least` to `most`."""

    def parsed(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of at least {least}")
        if value > most:
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is more than {most}")
        return value

    return parsed


def _seconds(text: str, least: float = 1e-9, most: float = 1e8, meaning: str = "") -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not least <= value <= most:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds{meaning}")
    return value
