"""The line that says how far a solve has come: its phase, best plan, bound, gap and seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pipeplan.cli.shared.output import live_line
from pipeplan.planning.progress import SolveProgress
from pipeplan.util.units import show_time

PHASES = {
    "": "choosing what to solve",
    "cuts": "listing the model's cuts",
    "DP": "searching with the DP",
    "ILP": "confirming with the ILP",
    "certificate": "making the certificate",
    "baselines": "searching for the baselines",
    "simulation": "simulating the plan",
    "why no plan fits": "finding out why no plan fits",
}
"""The words for every phase in the line."""


def progress_text(state: SolveProgress) -> str:
    """The state of a solve in one line."""
    parts = [PHASES.get(state.phase, state.phase)]
    if state.best_s is not None:
        parts.append(f"best {show_time(state.best_s)}")
    if state.bound_s is not None:
        parts.append(f"bound {show_time(state.bound_s)}")
    if state.gap is not None:
        parts.append(f"gap {state.gap:.2%}")
    return f"{parts[0]}: {', '.join([*parts[1:], f'{state.seconds:.0f} s'])}"


@contextmanager
def solve_line() -> Iterator[Callable[[SolveProgress], None]]:
    """Show the line while the block runs. Yields the function that a solve reports its progress to."""
    state = [SolveProgress.started()]

    def report(changed: SolveProgress) -> None:
        # Only kept: the line is drawn by another thread, a few times a second.
        state[0] = changed

    with live_line(lambda: progress_text(state[0])):
        yield report
