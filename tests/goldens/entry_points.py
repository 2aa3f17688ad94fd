"""The names of both packages, and of other tests, that the goldens use and that `import pipeplan` does not have.

When a module moves or a name changes, this is the only file of the goldens to adapt.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

TESTS = Path(__file__).resolve().parents[1]
LAYERS = 5
"""The most layers of a random problem."""


def command_line() -> click.Group:
    """The tree of commands of `pipeplan`."""
    from pipeplan.cli import cli

    return cli


def run_command_line() -> None:
    """Run `pipeplan` with the arguments in `sys.argv`, and raise `SystemExit`."""
    from pipeplan.cli import main

    main()


def launch_parser() -> argparse.ArgumentParser:
    """The parser of `python -m pipeplan_launch`, which `launch.sh --help` shows."""
    from pipeplan_launch.command_line import worker_parser

    return worker_parser("launch.sh")


def schedules() -> dict[str, Any]:
    """Every schedule of the executor, by its name."""
    from pipeplan_launch.plan.schedule import SCHEDULES

    return dict(SCHEDULES)


def stage_shape(replicas: int, depth: int, accumulate: int | None) -> Any:
    """One stage, as a schedule takes it."""
    from pipeplan_launch.plan.schedule import StageShape

    return StageShape(replicas, depth, accumulate)


def stream(schedule: Any, pipeline: list[Any], stage: int, replica: int, minibatches: int) -> Iterator[str]:
    """The actions of one replica in order, such as `F3`."""
    return (str(action) for action in schedule.stream(pipeline, stage, replica, minibatches))


def weight_version(schedule: Any, pipeline: list[Any], stage: int, minibatch: int) -> int:
    """The number of updates in the weights that a minibatch uses at a stage."""
    return int(schedule.version(pipeline, stage, minibatch))


def random_generators() -> dict[str, Any]:
    """The generators of random instances that the oracle's tests draw from, by their names."""
    module = _instances()
    return {
        "random": lambda seed, schedule: module.random_instance(seed, layers=LAYERS),
        "mixed": lambda seed, schedule: module.mixed_instance(seed, layers=LAYERS, schedule=schedule),
        "unequal": lambda seed, schedule: module.unequal_instance(seed, layers=LAYERS, schedule=schedule),
        "crowded": lambda seed, schedule: module.crowded_instance(seed, layers=LAYERS, schedule=schedule),
    }


def random_problem(seed: int, draw: Any) -> Any:
    """The first valid problem that `draw` makes of a seed, in the planner's types."""
    return _instances().drawn(seed, draw)[1]


def feasible(problem: Any) -> bool:
    """Whether a problem has any plan, without the diagnosis of why not, which can take minutes."""
    from pipeplan.problem.cuts import enumerate_cuts
    from pipeplan.solvers.dp import dynamic_program

    return dynamic_program.is_feasible(problem, enumerate_cuts(problem, 10_000))


def _instances() -> Any:
    folder = str(TESTS / "support")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import instances

    return instances
