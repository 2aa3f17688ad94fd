"""How near to its ideal pace the executor runs, with compute replaced by sleep, and what it costs per minibatch.

    python tests/benchmarks/executor_pace.py [small] [large] [overhead] [--plan P] [--minibatches N] [--repeats N]

small, large: a stage with r replicas sleeps r x 20 ms forward and r x 40 ms backward for each of its minibatches, so
that the ideal pace of every plan is 60 ms a minibatch. 0.1 MB or 16 MB cross each cut, the large ones also in a bare
loop of the same transfers (bare_transfers.py).
overhead: compute is replaced by nothing, 0.1 MB cross each cut. The overhead of a stage is what its busiest worker
takes of a core for one of its minibatches, all threads counted. The pace beside it is that of the whole pipeline on the
cores that there are, waking up included, where Linux may well leave one idle: once more with each worker bound to one.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bare_transfers import pace_s
from sleeping import How, Load, run

FORWARD_S, BACKWARD_S = 0.020, 0.040
PLANS = ([1, 1], [1, 1, 1, 1], [2, 1], [3, 1], [1, 2], [2, 1, 1], [3, 2, 1])
SMALL, LARGE = 25_000, 4_000_000
"""Floats."""
LEAST_SMALL, LEAST_LARGE, MOST_OVERHEAD_S = 0.97, 0.92, 1e-3


def measured(replicas: Sequence[int], load: Load, minibatches: int, how: How) -> dict[str, Any]:
    """The summary of one run."""
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder) / "plan", replicas, load, minibatches, how)


def share(replicas: Sequence[int], load: Load, minibatches: int, how: How) -> float:
    """Share of the ideal pace in one run."""
    pace: float = measured(replicas, load, minibatches, how)["minibatch_s"]["measured"]
    return (FORWARD_S + BACKWARD_S) / pace


def say(replicas: Sequence[int], what: str, found: Sequence[float], least: float | None) -> None:
    """One line of the table of shares."""
    target = "" if least is None else f"at least {least:.2f}"
    name = "-".join(map(str, replicas))
    print(
        f"{name:>8}  {what:<24} {statistics.median(found):.3f}  {min(found):.3f}-{max(found):.3f}  {target}", flush=True
    )


def small(plans: Sequence[list[int]], minibatches: int, repeats: int) -> None:
    """Tensors of 0.1 MB."""
    load = Load(FORWARD_S, BACKWARD_S, SMALL)
    for replicas in plans:
        say(replicas, "0.1 MB", [share(replicas, load, minibatches, How()) for _ in range(repeats)], LEAST_SMALL)


def large(plans: Sequence[list[int]], minibatches: int, repeats: int) -> None:
    """Tensors of 16 MB, and what Gloo's copies leave. The two take turns."""
    load = Load(FORWARD_S, BACKWARD_S, LARGE)
    for replicas in plans:
        found: dict[str, list[float]] = {"16 MB": [], "16 MB, bare loop": []}
        for _ in range(repeats):
            found["16 MB"].append(share(replicas, load, minibatches, How()))
            bare = pace_s(len(replicas), load, minibatches)
            found["16 MB, bare loop"].append((FORWARD_S + BACKWARD_S) / bare)
        for name, values in found.items():
            say(replicas, name, values, LEAST_LARGE if name == "16 MB" else None)


def overhead(plans: Sequence[list[int]], minibatches: int, repeats: int) -> None:
    """Nothing to compute."""
    ways = {"free": How(), "bound": How(pinned=True)}
    for replicas in plans:
        for name, how in ways.items():
            runs = [measured(replicas, Load(0.0, 0.0, SMALL), minibatches, how) for _ in range(repeats)]
            pace = statistics.median(one["minibatch_s"]["measured"] for one in runs)
            busiest = statistics.median(max(one["cpu_s"]) for one in runs)
            print(
                f"{'-'.join(map(str, replicas)):>8}  {name:<24} {busiest * 1e3:.2f} ms a stage and minibatch, at most "
                f"{MOST_OVERHEAD_S * 1e3:g}; {pace * 1e3:.2f} ms a minibatch",
                flush=True,
            )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help="small, large, overhead; all of them by default")
    parser.add_argument("--plan", help="only this one, such as 2-1")
    parser.add_argument("--minibatches", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=5)
    given = parser.parse_args()
    print(f"{'plan':>8}  {'across each cut':<24} share of the ideal pace: median, range, target")
    for name, (measure, plans, minibatches) in {
        "small": (small, PLANS, given.minibatches),
        "large": (large, PLANS[:2], given.minibatches),
        "overhead": (overhead, PLANS[:3], 20 * given.minibatches),
    }.items():
        if name in (given.parts or [name]):
            wanted = [plan for plan in plans if given.plan in (None, "-".join(map(str, plan)))]
            measure(wanted, minibatches, given.repeats)


if __name__ == "__main__":
    main()
