"""How fast training on two workers is, beside torch.distributed.pipelining and DistributedDataParallel (DDP).

    PYTHONPATH=tests/support python tests/benchmarks/peers.py [--only NAME] [--repeats N]

Two workers of one thread each, real compute, the same model, samples, updates and seeds on every side. Each side runs
as its users run it: ours by `pipeplan profile`, `pipeplan solve` and launch.sh, the peers by torchrun. The sides take
turns. A figure is the median, over the turns, of the peer's seconds per update over ours; above 1, ours is faster. The
first updates of every run are left out on all sides. Where sides must compute the same, their losses are compared.

A run during which other processes used more than a little of the machine is measured again.

Our workers have the C library keep the memory that is freed; no peer does, unless its user knows. So every peer also
runs with that setting (`allocator set` in the table), and the last column is the ratio to the best of all.

`shaped-vgg` needs to make network namespaces, which most machines allow, also without root.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from jobs import SUBJECTS
from peers_run import INSIDE, Ground, Here, Measured, Ours, Peers, Shaped, cluster_file, in_own_network
from rich.console import Console
from rich.table import Table

from pipeplan_launch.plan.stage_files import load_plan

TOLERANCE = 1e-3
"""Of losses, relative: sums in another order drift apart as training goes on."""
FINALISTS = 2
"""Peers that take part in every turn: the fastest of those tried."""
T = TypeVar("T")
MOST = 0.15
"""Cores that other processes may use, on average over a run."""
ATTEMPTS = 4
_STAT = Path("/proc/stat")
EVERY = ("1f1b", "gpipe", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev")


@dataclass(frozen=True)
class Row:
    """One comparison."""

    target: float
    """The ratio to reach."""
    ours: tuple[Ours, ...]
    theirs: tuple[str, ...]
    exact: bool
    """Whether both sides compute the same at every update, and not only at the first."""
    shaped: str | None = None
    """The rate of the link between the workers, if it is not loopback."""

    @property
    def subject(self) -> str:
        """The model."""
        return self.ours[0].subject


@dataclass(frozen=True)
class Settings:
    """How long to measure."""

    repeats: int
    warm: int
    updates: int
    """Measured, after the warm ones."""

    @property
    def all(self) -> int:
        """Updates of one run."""
        return self.warm + self.updates


@dataclass(frozen=True)
class Found:
    """The measurements of a row, by contender."""

    runs: Mapping[str, Sequence[Measured]]
    """One a turn."""
    tried: Mapping[str, float]
    """Seconds per update of the peers that were tried once, to choose who takes part."""


def flush(subject: str, microbatches: int) -> Row:
    """1F1B with a flush on both sides: the same split, the same microbatches."""
    one = SUBJECTS[subject]
    ours = Ours(subject, one.batch // microbatches, "1f1b-flush", microbatches, one.halves)
    return Row(1.0, (ours,), (f"1f1b:{microbatches}",), exact=True)


def several(subject: str, microbatches: int, schedule: str, peer: str) -> Row:
    """Two stages on each worker, on both sides: the same cuts, the same order of passes."""
    one = SUBJECTS[subject]
    cuts = one.looped if peer == "interleaved" else one.folded
    ours = Ours(subject, one.batch // microbatches, schedule, microbatches, cuts)
    return Row(1.0, (ours,), (f"{peer}:{microbatches}",), exact=True)


def asynchronous(subject: str) -> Row:
    """Asynchronous 1F1B, as many samples per update, against whatever schedule of the peer is fastest."""
    one = SUBJECTS[subject]
    ours = [Ours(subject, one.batch, "1f1b-stashing", 1, one.halves)]
    ours.append(Ours(subject, one.batch // 4, "2bw", 4, one.halves))
    theirs = tuple(f"{name}:{count}" for name in EVERY for count in (4, 8))
    return Row(1.05, tuple(ours), theirs, exact=False)


def single(subject: str) -> Row:
    """Data parallelism on both workers, which is a plan of one stage, against DDP."""
    ours = Ours(subject, SUBJECTS[subject].batch // 2, "1f1b-flush", 2, cuts=())
    return Row(1.0, (ours,), ("ddp:1",), exact=True)


def over_link(subject: str) -> Row:
    """The plan that `solve` chooses for two servers, against DDP on the same two."""
    ours = Ours(subject, SUBJECTS[subject].batch, "1f1b-stashing")
    return Row(2.3, (ours,), ("ddp:1",), exact=False, shaped="1gbit")


ROWS: Mapping[str, Row] = {
    **{f"flush-{subject}-{count}": flush(subject, count) for subject in ("vgg", "gpt") for count in (4, 8)},
    **{
        f"{peer}-{subject}-{count}": several(subject, count, schedule, peer)
        for subject in ("vgg", "gpt")
        for count in (4, 8)
        for schedule, peer in (("interleaved-1f1b", "interleaved"), ("zb-v", "zbv"))
    },
    **{f"async-{subject}": asynchronous(subject) for subject in ("vgg", "gpt")},
    "shaped-vgg": over_link("vgg"),
    **{f"single-{subject}": single(subject) for subject in ("vgg", "gpt")},
}


def measure(name: str, row: Row, settings: Settings, folder: Path) -> Found:
    """Every contender of a row, in turns."""
    ground: Ground = Shaped(row.shaped) if row.shaped else Here()
    cluster = folder / "cluster.toml"
    cluster.write_text(cluster_file("1 Gbit/s"))
    plans = {ours: ours.prepare(folder, str(cluster) if row.shaped else "local", 3) for ours in row.ours}
    for ours, plan in plans.items():
        say(f"{name}: {ours.name} runs {load_plan(plan).written()}")
    tried = try_once(ground, row, folder) if len(row.theirs) > FINALISTS else {}
    chosen = tuple(sorted(row.theirs, key=lambda peer: tried.get(peer, 0.0))[:FINALISTS])
    runs: dict[str, list[Measured]] = {}
    for turn in range(settings.repeats):
        for number, (ours, plan) in enumerate(plans.items()):
            found = undisturbed(partial(run_ours, ground, ours, plan, folder / f"run-{turn}-{number}", settings.all))
            runs.setdefault(ours.name, []).append(found)
        for keep_memory in (False, True):
            peers = Peers(row.subject, chosen, keep_memory)
            theirs = undisturbed(partial(peers.run, ground, folder / "peers.json", settings.all))
            for peer, found in theirs.items():
                runs.setdefault(peer, []).append(found)
        if turn == 0:
            check_losses(row, runs)
        say(f"{name}: turn {turn + 1} of {settings.repeats}")
    return Found(runs, tried)


def run_ours(ground: Ground, ours: Ours, plan: Path, run_dir: Path, updates: int) -> Measured:
    """Train in a new run folder, also where an attempt has left one."""
    shutil.rmtree(run_dir, ignore_errors=True)
    return ours.run(ground, plan, run_dir, updates)


def try_once(ground: Ground, row: Row, folder: Path) -> dict[str, float]:
    """Seconds per update of every peer, in one short run."""
    once = Peers(row.subject, row.theirs, keep_memory=True).run(ground, folder / "peers.json", updates=4)
    return {name.removesuffix("+"): found.update_s(warm=1) for name, found in once.items()}


def check_losses(row: Row, runs: Mapping[str, Sequence[Measured]]) -> None:
    """Both sides must have computed the same. Raises RuntimeError."""
    ours = [one.name for one in row.ours]
    for own in ours:
        losses = runs[own][0].losses
        for peer in runs.keys() - ours:
            theirs = runs[peer][0].losses
            for update in range(len(losses) if row.exact else 1):
                if abs(losses[update] - theirs[update]) > TOLERANCE * abs(theirs[update]):
                    raise RuntimeError(f"{own} and {peer} have other losses: {losses} and {theirs}")


def ratios(ours: Sequence[Measured], theirs: Sequence[Measured], warm: int) -> list[float]:
    """The peer's time over ours, by turn."""
    return [peer.update_s(warm) / own.update_s(warm) for own, peer in zip(ours, theirs, strict=True)]


def add(table: Table, name: str, row: Row, found: Found, settings: Settings) -> None:
    """The lines of a row: every contender, ours with its ratio to the fastest peer."""
    warm = settings.warm
    medians = {who: statistics.median(run.update_s(warm) for run in runs) for who, runs in found.runs.items()}
    ours = {one.name for one in row.ours}
    plain = min((who for who in medians.keys() - ours if not who.endswith("+")), key=medians.__getitem__)
    best = min(medians.keys() - ours, key=medians.__getitem__)
    for number, (who, runs) in enumerate(found.runs.items()):
        cells = [f"{medians[who] * 1e3:.0f}", str(len(runs))]
        cells.append(", ".join(f"{memory / 2**20:.0f}" for memory in runs[0].memory_bytes))
        if who in ours:
            cells += [spread(ratios(runs, found.runs[peer], warm)) for peer in (plain, best)]
            cells.insert(-1, f"{row.target:.2f}")
        else:
            cells += ["fastest peer" if who == plain else "", "", "fastest of all" if who == best else ""]
        table.add_row("" if number else name, label(who), *cells)
    for who, time_s in found.tried.items():
        if who not in found.runs:
            table.add_row("", label(f"{who}+"), f"{time_s * 1e3:.0f}", "tried")
    table.add_section()


def spread(found: Sequence[float]) -> str:
    """The median, and from where to where."""
    return f"{statistics.median(found):.2f} ({min(found):.2f}-{max(found):.2f})"


def label(contender: str) -> str:
    """As the table has it."""
    plain = contender.removesuffix("+")
    kind, colon, microbatches = plain.partition(":")
    text = "torch DDP" if kind == "ddp" else f"torch {kind}, M = {microbatches}"
    if not colon:
        return contender
    return text + ", allocator set" * contender.endswith("+")


@dataclass(frozen=True)
class Moment:
    """Seconds so far: of the clock, of work on all cores, of work by processes that this one started and waited for."""

    clock: float
    all: float
    own: float

    @staticmethod
    def now() -> Moment:
        """Read the clocks."""
        worked = 0.0
        if _STAT.exists():
            user, nice, system, _idle, _waiting, irq, softirq, stolen = map(int, _STAT.read_text().split()[1:9])
            worked = (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")
        times = os.times()
        return Moment(time.perf_counter(), worked, sum(times[:4]))

    def others_since(self, before: Moment) -> float:
        """Cores that others used in between, on average. What another machine on the same processor took is in it."""
        return max(0.0, (self.all - before.all) - (self.own - before.own)) / (self.clock - before.clock)


def undisturbed(run: Callable[[], T]) -> T:
    """The result of a run during which others used next to nothing, of a few attempts; says so if there is none."""
    for attempt in range(ATTEMPTS):
        before = Moment.now()
        result = run()
        others = Moment.now().others_since(before)
        if others <= MOST:
            break
        what = "measured again" if attempt + 1 < ATTEMPTS else "kept all the same"
        print(f"  disturbed: other processes used {others:.2f} cores; {what}", file=sys.stderr, flush=True)
    return result


def say(text: str) -> None:
    """On stderr, as the table goes to stdout."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ROWS, help="one row")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--warm", type=int, default=2, help="updates left out at the start of a run")
    parser.add_argument("--updates", type=int, default=5, help="updates measured in a run")
    given = parser.parse_args()
    settings = Settings(given.repeats, given.warm, given.updates)
    table = Table("row", "contender", "ms/update", "runs", "MiB, each worker", "ratio", "at least", "to any peer")
    chosen = [given.only] if given.only else list(ROWS)
    for name in chosen:
        if ROWS[name].shaped and not os.environ.get(INSIDE):
            if status := in_own_network([*sys.argv[1:], *([] if given.only else ["--only", name])]):
                return status
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                found = measure(name, ROWS[name], settings, Path(folder))
            except (OSError, RuntimeError) as error:
                say(f"{name}: {error}")
                return 1
            add(table, name, ROWS[name], found, settings)
    if table.row_count:
        Console(width=None if sys.stdout.isatty() else 120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
