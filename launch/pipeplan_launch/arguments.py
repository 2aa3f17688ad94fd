"""The options of a run. Torch-free."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from pathlib import Path
from typing import NoReturn

from pipeplan_launch.averaging import Compression, parse_compression, parse_significance


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with an option in one line, with the nearest right one."""

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        line = message.removeprefix("argument ") if unknown is None else self._unknown(unknown[1])
        print(f"error: {self.prog}: {' '.join(line.split())}", file=sys.stderr)
        sys.exit(2)

    def _unknown(self, given: str) -> str:
        if not given.startswith("-"):
            return f"{given!r} follows no option that takes it: see --help"
        known = [option for option in self._option_string_actions if option.startswith("--")]
        near = difflib.get_close_matches(given.partition("=")[0], known, n=1, cutoff=0.6)
        hint = f"did you mean {near[0]}?" if near else "see --help"
        return f"there is no option {given}; {hint}"


def parser(prog: str) -> argparse.ArgumentParser:
    """The command line of a worker; launch.sh passes its own on."""
    parser = _Parser(
        prog=prog,
        description="Run a plan. Its folder's launch.sh starts all workers, and passes these options on.",
    )
    parser.add_argument("plan_folder", type=Path, metavar="PLAN_FOLDER", help="what `pipeplan solve` wrote")
    parser.add_argument("--epochs", type=_positive, metavar="N", help="epochs in all (10); inference: passes (1)")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--resume-from", type=Path, metavar="D", help="go on from this checkpoint or run in a new one")
    parser.add_argument("--run-dir", type=Path, metavar="D", help="run folder (PLAN_FOLDER/runs/<UTC time>)")
    parser.add_argument("--seed", type=_seed, metavar="N", help="of weights, order of samples and dropout (0)")
    parser.add_argument("--weights", type=Path, metavar="D", help="begin with the weights of this checkpoint or run")
    parser.add_argument(
        "--log-every", type=_natural, default=20, metavar="N", help="minibatches per line; 0: none (20)"
    )
    parser.add_argument("--threads", type=_threads, metavar="N", help="torch threads per worker (OMP_NUM_THREADS)")
    parser.add_argument("--checkpoint-every", type=_positive, default=1, metavar="N", help="epochs (1)")
    parser.add_argument(
        "--checkpoint-minibatches", type=_positive, metavar="N", help="and within an epoch, minibatches (none)"
    )
    parser.add_argument("--evaluate-every", type=_positive, default=1, metavar="N", help="epochs (1); the last always")
    parser.add_argument("--max-minibatches", type=_positive, metavar="N", help="of every epoch, the first N only")
    parser.add_argument("--restarts", type=_natural, default=3, metavar="N", help="after faults, at most (3)")
    averaging = parser.add_mutually_exclusive_group()
    averaging.add_argument(
        "--compress",
        type=_compression,
        metavar="HOW",
        help="gradients among replicas: bf16, powersgd or powersgd:RANK (not)",
    )
    averaging.add_argument(
        "--significance", type=_significance, metavar="V%", help="between servers only updates above V%% of the weight"
    )
    parser.add_argument(
        "--probe",
        type=_probe,
        default=2.0,
        metavar="S",
        help="measure links between servers first; 0: not (2)",
    )
    parser.add_argument("--timeout", type=_seconds, default=600.0, metavar="S", help="wait for a peer, at most (600)")
    return parser


def _compression(text: str) -> Compression:
    try:
        return parse_compression(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _significance(text: str) -> float:
    try:
        return parse_significance(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _natural(text: str) -> int:
    return _number(text, 0)


def _positive(text: str) -> int:
    return _number(text, 1)


def _seed(text: str) -> int:
    return _number(text, 0, 2**63 - 1)


def _threads(text: str) -> int:
    return _number(text, 1, 4096)


def _number(text: str, least: int, most: int = 2**63 - 1) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number of at least {least}")
    if value > most:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is more than {most}")
    return value


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e8:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _probe(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 (no probe) to 600")
    return value
