"""A run with a random fault every few seconds: are its losses those of an undisturbed one, is anything lost or left?

    PYTHONPATH=tests/support python tests/benchmarks/chaos.py [--minutes 10] [--every 10] [--seed 0] [--workers 3]

Profiles and plans the bundled `mnist` model for this machine and trains it while workers and the launcher are killed,
frozen and stopped, checkpoints are damaged, the disk is full or slow, the network is cut, clocks step, and losses are
no numbers. Whatever ends is started again by `--resume`. All runs in namespaces of its own, where there is leave to
make them; without, the network is not cut.
Afterwards an undisturbed run trains as far. Printed are the faults, and whether every loss is the same bit by bit,
every checkpoint that was complete at a fault was gone on from (or the one before, where it was damaged), and no
process, shared memory or temporary file is left (but for the folder of a launcher that was killed, one each). Status 0
if all is as it should be. Without namespaces, semaphores of other programs count as left: let none run beside it.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIG_DFL, SIGCONT, SIGHUP, SIGKILL, SIGSTOP, SIGTERM, signal

from launching import PATIENCE_S, Launch, curve, last_step
from network_namespaces import OWN_NAMESPACES
from rich.console import Console
from rich.table import Table

EPOCH = 40
"""Minibatches of an epoch."""
PIPEPLAN = (sys.executable, "-m", "pipeplan")
OPTIONS = ("--epochs", "1000000", "--max-minibatches", str(EPOCH), "--log-every", "0", "--restarts", "1000")
OPTIONS += ("--checkpoint-minibatches", "10", "--evaluate-every", "1000", "--timeout", "10")
NAME = re.compile(r"checkpoints/(epoch-\d+-sample-\d+)")
BURST_BYTES = 1 << 28
JOB = """
from dataclasses import replace
from pathlib import Path

from torch.utils.data import Dataset

from pipeplan_launch.models import mnist

POISON = Path(__file__).with_name("poison")


class Poisoned(Dataset):
    def __init__(self, clean):
        self.clean = clean

    def __len__(self):
        return len(self.clean)

    def __getitem__(self, index):
        image, label = self.clean[index]
        return (image * float("nan") if POISON.exists() else image), label


def data():
    clean = mnist.digits()
    return replace(clean, train=Poisoned(clean.train))


def build():
    return replace(mnist.build(), data=data)
"""
"""The bundled job, whose samples are no numbers while the file `poison` is there."""
CUT_S = (0.5, 20.0)
"""Least and most seconds for which the network is cut."""
FULL_BYTES = 1000
"""Largest file that workers may write while the disk stands for a full one: less than any checkpoint."""


CLOCK = "PIPEPLAN_TEST_CLOCK"
_SITE = f"""
import mmap, os, struct, time

with open(os.environ["{CLOCK}"], "rb") as _file:
    _step = mmap.mmap(_file.fileno(), 8, prot=mmap.PROT_READ)
_machine = time.time
time.time = lambda: _machine() + struct.unpack("d", _step)[0]
"""


def clock_environment(folder: Path) -> dict[str, str]:
    """Variables for processes whose `time.time()` steps by what `step_clock` writes into `folder`, which must stay.

    Only this clock steps: what waits must go by `time.monotonic()`.
    """
    (folder / "sitecustomize.py").write_text(_SITE)
    (folder / "clock").write_bytes(struct.pack("d", 0.0))
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), CLOCK: str(folder / "clock")}


def step_clock(folder: Path, seconds: float) -> None:
    """Set the clock so many seconds before or behind the machine's."""
    with open(folder / "clock", "r+b", buffering=0) as file:
        file.write(struct.pack("d", seconds))


@dataclass
class Chaos:
    """What came of the run."""

    faults: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    """How often the launcher was started again."""
    minibatches: int = 0
    same: bool = False
    lost: list[str] = field(default_factory=list)
    """Faults after which training went on from an older checkpoint than it should."""
    left: list[str] = field(default_factory=list)
    """What the run left behind."""

    @property
    def right(self) -> bool:
        """Whether all is as it should be."""
        return self.same and not self.lost and not self.left and self.minibatches > 0


class Runs:
    """The launches of one run, of which one is there at any time."""

    def __init__(self, script: Path, run: Path) -> None:
        self._script, self.run = script, run
        self.folder = run.parent
        self._clock = clock_environment(self.folder)
        self.launch = Launch(script, run, *OPTIONS, **self._clock)
        self.started = 1
        self._lines = 0

    def resume(self) -> None:
        """Start the launcher again, after all processes of the one before are gone."""
        self.launch.wait()
        _soon(lambda: not self.launch.started(), "end of all processes")
        self.launch.__exit__(None, None, None)
        self.launch, self._lines = Launch(self._script, self.run, *OPTIONS, "--resume", **self._clock), 0
        self.started += 1

    def go_on(self) -> None:
        """Wait until minibatches are finished again; a launcher that has ended is started again."""
        now = time.time()
        deadline = time.monotonic() + PATIENCE_S
        while self.launch.latest_s() <= now:
            if self.launch.process.poll() is not None:
                self.resume()
            if time.monotonic() > deadline:
                raise SystemExit(f"training does not go on: {self.launch.lines[-20:]}")
            time.sleep(0.05)
        self.launch.workers()

    def mark(self) -> None:
        """Forget what was printed so far."""
        self._lines = len(self.launch.lines)

    def gone_on_from(self) -> list[str]:
        """The names of the checkpoints that were named since the mark."""
        return [match[1] for line in self.launch.lines[self._lines :] if (match := NAME.search(line))]


def plan_job(folder: Path, workers: int) -> Path:
    """launch.sh of the best plan for the job with a stage on each of so many workers."""
    (folder / "job.py").write_text(JOB)
    profile, plan = folder / "profile.json", folder / "plan"
    shape = ("--cluster", "local", "--workers", workers, "--stages", workers, "-o", plan)
    for arguments in (("profile", f"{folder / 'job.py'}:build", "-o", profile), ("solve", profile, *shape)):
        subprocess.run([*PIPEPLAN, *map(str, arguments)], check=True, capture_output=True)
    return plan / "launch.sh"


def _soon(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"no {what}")
        time.sleep(0.02)


def complete(run: Path) -> list[str]:
    """The names of the complete checkpoints, oldest first."""
    return sorted(path.parent.name for path in run.glob("checkpoints/*/manifest.json"))


Fault = Callable[[Runs, random.Random], None]


def kill(runs: Runs, draw: random.Random) -> None:
    """kill -9 of one worker."""
    runs.launch.kill(draw.choice(sorted(runs.launch.workers())))


def kill_all(runs: Runs, draw: random.Random) -> None:
    """kill -9 of all workers."""
    for pid in runs.launch.workers().values():
        with suppress(ProcessLookupError):
            os.kill(pid, SIGKILL)


def freeze(runs: Runs, draw: random.Random) -> None:
    """One worker stops for good."""
    runs.launch.kill(draw.choice(sorted(runs.launch.workers())), SIGSTOP)
    time.sleep(12)


def flap(runs: Runs, draw: random.Random) -> None:
    """One worker stops for a while, several times."""
    pid = draw.choice(sorted(runs.launch.workers().values()))
    for _ in range(3):
        for number in (SIGSTOP, SIGCONT):
            with suppress(ProcessLookupError):
                os.kill(pid, number)
            time.sleep(draw.uniform(0.2, 1.0))


def _launcher(number: int) -> Fault:
    def strike(runs: Runs, draw: random.Random) -> None:
        runs.launch.process.send_signal(number)
        runs.resume()

    return strike


def _damage(harm: Callable[[Path, random.Random], None]) -> Fault:
    """The latest checkpoint is damaged while the launcher is down."""

    def strike(runs: Runs, draw: random.Random) -> None:
        runs.launch.process.kill()
        runs.launch.wait()
        _soon(lambda: not runs.launch.started(), "end of all processes")
        harm(runs.run / "checkpoints" / complete(runs.run)[-1], draw)
        runs.resume()

    return strike


def _flip_in(file: Path, draw: random.Random) -> None:
    raw = bytearray(file.read_bytes())
    raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    file.write_bytes(raw)


def _flip_manifest(folder: Path, draw: random.Random) -> None:
    _flip_in(folder / "manifest.json", draw)


def _tensors(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name != "manifest.json" and path.stat().st_size)


def _truncate_tensors(folder: Path, draw: random.Random) -> None:
    file = draw.choice(_tensors(folder))
    os.truncate(file, draw.randrange(file.stat().st_size))


def _remove_tensors(folder: Path, draw: random.Random) -> None:
    draw.choice(_tensors(folder)).unlink()


def disk_full(runs: Runs, draw: random.Random) -> None:
    """No worker can write a checkpoint any more."""
    for pid in runs.launch.workers().values():
        with suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (FULL_BYTES, FULL_BYTES))
    time.sleep(3)


def slow_disk(runs: Runs, draw: random.Random) -> None:
    """Others keep the disk busy."""
    path = runs.run.parent / "burst"
    with path.open("wb") as file:
        for _ in range(4):
            file.write(os.urandom(1 << 20) * (BURST_BYTES >> 20))
            os.fsync(file.fileno())
            file.seek(0)
    path.unlink()


def cut(runs: Runs, draw: random.Random) -> None:
    """Nothing reaches anybody over the network for a while."""
    _loopback("down")
    time.sleep(draw.uniform(*CUT_S))
    _loopback("up")


def _loopback(state: str) -> None:
    subprocess.run(["ip", "link", "set", "lo", state], check=True)


def clock_step(runs: Runs, draw: random.Random) -> None:
    """The clocks of all processes step by an hour, and after a while back."""
    step_clock(runs.folder, draw.choice([-3600.0, 3600.0]))
    time.sleep(draw.uniform(1, 12))
    step_clock(runs.folder, 0.0)


def not_a_number(runs: Runs, draw: random.Random) -> None:
    """Samples are no numbers, so that the run stops; then they are in order again."""
    poison = runs.folder / "poison"
    poison.touch()
    runs.launch.wait()
    poison.unlink()
    if not runs.launch.said("the loss became non-finite"):
        raise SystemExit(f"a loss that is no number is not said: {runs.launch.lines[-5:]}")
    runs.resume()


FAULTS: dict[str, Fault] = {
    "kill": kill,
    "kill all": kill_all,
    "freeze": freeze,
    "flap": flap,
    "launcher killed": _launcher(SIGKILL),
    "SIGTERM": _launcher(SIGTERM),
    "SIGHUP": _launcher(SIGHUP),
    "flipped manifest": _damage(_flip_manifest),
    "truncated tensors": _damage(_truncate_tensors),
    "removed tensors": _damage(_remove_tensors),
    "disk full": disk_full,
    "slow disk": slow_disk,
    "clock step": clock_step,
    "not a number": not_a_number,
}
DAMAGING = ("flipped manifest", "truncated tensors", "removed tensors")


def chaos(script: Path, folder: Path, *, minutes: float, every_s: float, seed: int) -> Chaos:
    """Run with faults, then undisturbed as far."""
    found, draw, run = Chaos(), random.Random(seed), folder / "faulty"
    shared = set(os.listdir("/dev/shm"))
    runs = Runs(script, run)
    runs.go_on()
    ends, waiting = time.monotonic() + 60 * minutes, list(FAULTS)
    draw.shuffle(waiting)
    while time.monotonic() < ends:
        runs.launch.until(lambda: len(complete(run)) >= 2, "two checkpoints")
        time.sleep(draw.uniform(0, every_s))
        name = waiting.pop() if waiting else draw.choice(sorted(FAULTS))
        _strike(runs, name, draw, found)
    runs.launch.process.send_signal(SIGTERM)
    runs.launch.wait()
    _soon(lambda: not runs.launch.started(), "end of all processes")
    found.resumed, found.minibatches = runs.started - 1, len(curve(run))
    with suppress(SystemExit):
        _soon(lambda: not set(os.listdir("/dev/shm")) - shared, "end of shared memory")
    found.left += [f"/dev/shm/{name}" for name in sorted(set(os.listdir("/dev/shm")) - shared)]
    known = {"faulty", "profile.json", "plan", "job.py", "clock", "sitecustomize.py", "__pycache__"}
    others = sorted(path.name for path in folder.iterdir() if path.name not in known)
    kills = sum(found.faults[name] for name in ("launcher killed", *DAMAGING))
    found.left += [name for name in others if not name.startswith(("pipeplan-", "torchinductor_"))]
    found.left += [name for name in others if name.startswith("pipeplan-")][kills:]
    found.left += [str(path) for path in run.rglob("*.part")]
    found.same = _is_that_of(curve(run), script, folder / "plain")
    return found


def _strike(runs: Runs, name: str, draw: random.Random, found: Chaos) -> None:
    """One fault, and what training went on from."""
    before = complete(runs.run)
    runs.mark()
    began = time.monotonic()
    FAULTS[name](runs, draw)
    runs.go_on()
    print(f"{name}: training again after {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
    found.faults[name] += 1
    least = before[-2] if name in DAMAGING else before[-1]
    for taken in runs.gone_on_from()[:1]:
        if taken < least:
            found.lost.append(f"{name}: from {taken}, though {least} was complete")


def _is_that_of(losses: dict[tuple[int, int], float], script: Path, run: Path) -> bool:
    """Whether an undisturbed run has the same losses. It is stopped once it is as far."""
    last = max(losses)
    with Launch(script, run, *OPTIONS) as launch:
        while (step := last_step(run)) is None or (step["epoch"], step["minibatch"]) <= last:
            if launch.process.poll() is not None:
                raise SystemExit(f"the undisturbed run failed: {launch.lines}")
            time.sleep(0.2)
        launch.process.send_signal(SIGTERM)
        launch.wait()
    undisturbed = curve(run)
    return all(undisturbed.get(place) == loss for place, loss in losses.items())


_IN_NAMESPACES = (*OWN_NAMESPACES, "--mount-proc")


def _namespaces_work() -> bool:
    """Whether this user may make namespaces, and has the command that cuts the network there."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return False
    return subprocess.run([*_IN_NAMESPACES, "true"], capture_output=True, check=False).returncode == 0


def main() -> int:
    """Print the table; the status is 0 if all is as it should be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--every", type=float, default=10.0, help="most seconds from one fault to the next")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--in-namespace", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    signal(SIGHUP, SIG_DFL)  # `nohup` would hand on to all launches that they ignore it
    if given.in_namespace:
        _loopback("up")
        subprocess.run(
            ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True
        )  # other programs' is not ours to count
        FAULTS["cut"] = cut
    elif _namespaces_work():
        os.execvp(OWN_NAMESPACES[0], [*_IN_NAMESPACES, sys.executable, *sys.argv, "--in-namespace"])
    with tempfile.TemporaryDirectory() as folder:
        script = plan_job(Path(folder), given.workers)
        result = chaos(script, Path(folder), minutes=given.minutes, every_s=given.every, seed=given.seed)
    table = Table("faults", "resumed", "minibatches", "same losses", "lost", "left")
    counts = [str(sum(result.faults.values())), str(result.resumed), str(result.minibatches)]
    table.add_row(*counts, "yes" if result.same else "no", str(len(result.lost)), str(len(result.left)))
    Console().print(table)
    for line in (", ".join(f"{count} × {name}" for name, count in sorted(result.faults.items())), *result.lost):
        print(line)
    print(*result.left, sep="\n")
    return 0 if result.right else 1


if __name__ == "__main__":
    sys.exit(main())
