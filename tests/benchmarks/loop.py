"""Whether calibrating converges: predict, run, calibrate, predict again, run again, on this machine.

    python tests/benchmarks/loop.py [--only NAME] [--all] [--turns N] [--runs N] [--attempts N] [--folder F] [--stages]

A bundled model is profiled by as many processes as the plan has workers, and solved for (`--cluster local`). launch.sh
runs the plan a few times. `pipeplan calibrate` makes a new profile and cluster of these runs; the model is solved for
again with them, which may give another plan, and that is run as often: the second turn. (--turns 3 goes on, calibrating
by all runs so far.) Paces are those that the runs' tables show, in minibatches a second: the median of the runs, with
the slowest and the fastest. The error is predicted over measured, less one; the aim is that the second is within 3%, or
within the spread of the runs where that is larger: (fastest - slowest) / median, the larger of this turn's spread and
the one before's. What others used of the machine decides whether a run is run again (`peers_load`).

The quick set takes about ten minutes. --all has larger models too: half an hour more.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import peers_load
from peers_load import undisturbed
from peers_run import Here, pipeplan

AIM = 0.03


@dataclass(frozen=True)
class Subject:
    """A bundled model, and how it is run."""

    model: str
    minibatch: int
    workers: int
    minibatches: int
    """Of an epoch, at most."""
    epochs: int = 1
    passes: int = 9
    """Of the profile."""


QUICK: Mapping[str, Subject] = MappingProxyType(
    {
        "mnist-2": Subject("mnist", 32, 2, 1000, epochs=12),
        "mnist-3": Subject("mnist", 32, 3, 1000, epochs=12),
        "resnet-tiny-2": Subject("resnet-tiny", 32, 2, 200),
        "resnet-tiny-3": Subject("resnet-tiny", 32, 3, 200),
        "alexnet-2": Subject("alexnet", 4, 2, 40, passes=5),
    }
)
LARGE: Mapping[str, Subject] = MappingProxyType(
    {
        "vgg16-2": Subject("vgg16", 1, 2, 24, passes=3),
        "resnet50-2": Subject("resnet50", 2, 2, 40, passes=3),
        "gnmt8-2": Subject("gnmt8", 2, 2, 24, passes=3),
        "gnmt16-2": Subject("gnmt16", 2, 2, 24, passes=3),
        "awd-lm-2": Subject("awd-lm", 4, 2, 24, passes=3),
        "s2vt-2": Subject("s2vt", 4, 2, 24, passes=3),
    }
)


@dataclass
class Turn:
    """A prediction, and the runs of its plan."""

    folder: Path
    plan: str
    predicted_s: float
    summaries: list[dict[str, Any]] = field(default_factory=list)

    @property
    def paces(self) -> list[float]:
        """Measured, minibatches a second."""
        return [1 / summary["minibatch_s"]["measured"] for summary in self.summaries]

    @property
    def median(self) -> float:
        """Of the paces."""
        return statistics.median(self.paces)

    @property
    def spread(self) -> float:
        """Of the runs, relative."""
        return (max(self.paces) - min(self.paces)) / self.median

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return 1 / self.predicted_s / self.median - 1

    def shown(self) -> str:
        """One part of a row."""
        ends = f"({min(self.paces):.2f}-{max(self.paces):.2f})"
        return f"{self.plan:<6} {1 / self.predicted_s:9.2f} {self.median:9.2f} {ends:<17} {self.error:+7.1%}"

    def allowed(self, before: Turn) -> float:
        """How far the prediction may be off."""
        return max(AIM, self.spread, before.spread)


def turn(profile: Path, cluster: tuple[object, ...], folder: Path, subject: Subject, runs: int) -> Turn:
    """Solve, and run what that gives."""
    pipeplan("solve", profile, *cluster, "-o", folder, "--force")
    document = json.loads((folder / "plan.json").read_text())
    found = Turn(folder, document["plan"]["config"], document["prediction"]["minibatch_s"])
    options = ("--epochs", subject.epochs, "--max-minibatches", subject.minibatches, "--log-every", 0)
    quiet = ("--evaluate-every", subject.epochs, "--checkpoint-every", subject.epochs)
    for number in range(runs):
        run = folder / "runs" / f"run-{number}"

        def launch(run: Path = run) -> None:
            Here().run(("rm", "-rf", str(run)))
            command = ("bash", folder / "launch.sh", *options, *quiet, "--run-dir", run)
            Here().run(tuple(map(str, command)))

        undisturbed(launch)
        found.summaries.append(json.loads((run / "summary.json").read_text()))
        Here().run(("rm", "-rf", str(run / "checkpoints")))
    return found


def loop(subject: Subject, folder: Path, turns: int, runs: int) -> Iterator[Turn]:
    """Predictions and their runs, each calibrated by all that were before."""
    folder.mkdir(parents=True, exist_ok=True)
    profile = folder / "profile.json"
    if not profile.exists():
        given = ("--batch", subject.minibatch, "--repeats", subject.passes, "--processes", subject.workers)
        undisturbed(partial(pipeplan, "profile", subject.model, *given, "-o", profile))
    found = [turn(profile, ("--cluster", "local", "--workers", subject.workers), folder / "plan-1", subject, runs)]
    yield found[0]
    for number in range(2, turns + 1):
        new, cluster = folder / f"calibrated-{number}.json", folder / f"calibrated-{number}.toml"
        ran = [one.folder / "runs" / f"run-{index}" for one in found for index in range(runs)]
        pipeplan("calibrate", *ran, "--profile", profile, "-o", new, "--cluster-output", cluster, "--force")
        found.append(turn(new, ("--cluster", cluster), folder / f"plan-{number}", subject, runs))
        yield found[-1]


def show_stages(found: Turn) -> None:
    """What each stage was to take and took, and the first cause."""
    for number in range(len(found.summaries[0]["stages"])):
        stages = [summary["stages"][number] for summary in found.summaries]
        parts = []
        for name in ("forward", "backward", "update", "sync", "wait"):
            pairs = [stage[f"{name}_s"] for stage in stages]
            measured = statistics.median(pair["measured"] for pair in pairs)
            parts.append(f"{name} {pairs[0]['predicted'] * 1e3:.1f} -> {measured * 1e3:.1f}")
        for name in ("send", "load", "other", "cpu"):
            parts.append(f"{name} {statistics.median(one['measured'][f'{name}_s'] for one in stages) * 1e3:.1f}")
        print(f"        stage {number}, ms: {', '.join(parts)}")
    causes = [summary["cause"] for summary in found.summaries]
    print(f"        {causes[0]['text'] if causes[0] else 'as predicted'}", flush=True)


def main() -> None:
    """Print the table."""
    everything = {**QUICK, **LARGE}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=everything, action="append", help="only this one; may be repeated")
    parser.add_argument("--all", action="store_true", help="the larger models too")
    parser.add_argument("--turns", type=int, default=2, help="of predicting and running")
    parser.add_argument("--runs", type=int, default=3, help="of each plan")
    parser.add_argument("--attempts", type=int, default=peers_load.ATTEMPTS, help="at what others disturb")
    parser.add_argument("--folder", type=Path, help="keeps everything; profiles that are there are taken")
    parser.add_argument("--stages", action="store_true", help="what each stage took, and the first causes")
    given = parser.parse_args()
    peers_load.ATTEMPTS = given.attempts
    sizes = given.turns, given.runs
    names = given.only or list(everything if given.all else QUICK)
    print(f"{'model':<14} turn {'plan':<6} {'predicted':>9} {'measured':>9} {'':<17} {'error':>7}  allowed", flush=True)
    met, begun = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            before: Turn | None = None
            for number, one in enumerate(loop(everything[name], (given.folder or Path(scratch)) / name, *sizes), 1):
                verdict = ""
                if before is not None:
                    allowed = one.allowed(before)
                    within = abs(one.error) <= allowed
                    met += number == 2 and within
                    verdict = f"{allowed:.1%}{'' if within else ': no'}"
                print(f"{name if number == 1 else '':<14} {number:4} {one.shown()}  {verdict}", flush=True)
                if given.stages:
                    show_stages(one)
                before = one
    print(f"{met} of {len(names)} second predictions are within 3% or the spread; {time.monotonic() - begun:.0f} s")


if __name__ == "__main__":
    main()
