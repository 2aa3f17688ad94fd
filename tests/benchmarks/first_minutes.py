"""The first minutes of a new user: from an empty folder to the first trained minibatch of three workers, step by step.

Makes a wheel and a virtual environment, installs, and types what `pipeplan init` says. Downloads are made first, and
counted apart: they depend on the network, not on pipeplan. A table of the seconds waited for each step.

    .venv/bin/python tests/benchmarks/first_minutes.py [--workers N] [--keep FOLDER] [--cpu-torch]

`--keep` leaves everything in a folder, and a second run there downloads nothing. `--cpu-torch` links the environment to
the torch of this interpreter in place of installing one: for machines where gigabytes are too many.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
AIM_S = 180.0


class Steps:
    """What was waited for, in order."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, bool]] = []

    @contextmanager
    def step(self, name: str, *, download: bool = False) -> Iterator[None]:
        print(f"{name} …", file=sys.stderr, flush=True)
        began = time.monotonic()
        yield
        self.rows.append((name, time.monotonic() - began, download))

    def show(self) -> None:
        width = max(len(name) for name, _, _ in self.rows)
        for name, seconds, download in self.rows:
            print(f"{name:{width}}  {seconds:7.1f} s{'  (download)' if download else ''}")
        waited = sum(seconds for _, seconds, download in self.rows if not download)
        print(f"{'waited, beyond downloads':{width}}  {waited:7.1f} s  (aim: under {AIM_S:.0f} s)")


def typed(command: str, folder: Path, **environment: str) -> None:
    """Run a command in a shell as a user would; its output goes to standard error. Ends the benchmark if it fails."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_", "VIRTUAL"))}
    subprocess.run(command, shell=True, cwd=folder, check=True, stdout=sys.stderr, env=clean | environment)


def until_first_minibatch(command: str, folder: Path, path: str) -> subprocess.Popen[bytes]:
    """Start a launch, and wait until a minibatch was trained; what is left of it goes on."""
    earlier = set(folder.glob("plan/runs/*"))
    process = subprocess.Popen(
        command, shell=True, cwd=folder, stdout=subprocess.DEVNULL, env=os.environ | {"PATH": path}
    )
    while process.poll() is None:
        runs = [run for run in folder.glob("plan/runs/*") if run not in earlier]
        if any(file.stat().st_size for run in runs for file in run.glob("metrics/rank-*.jsonl")):
            break
        time.sleep(0.05)
    return process


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--cpu-torch", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="first-minutes-") as scratch:
        place = (given.keep or Path(scratch)).resolve()
        place.mkdir(parents=True, exist_ok=True)
        measure(place, given.workers, given.cpu_torch).show()


def measure(place: Path, workers: int, linked: bool) -> Steps:
    """All steps, in a folder of their own."""
    steps, wheels = Steps(), place / "wheels"
    wheels.mkdir(exist_ok=True)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", wheels, ROOT], check=True, stdout=subprocess.DEVNULL
    )
    wheel = next(wheels.glob("pipeplan-*.whl"))
    extras = "examples" if linked else "torch,examples"
    with steps.step("pip download", download=True):
        typed(f"{sys.executable} -m pip download -q -d '{wheels}' '{wheel}[{extras}]'", place)
    lab = place / "lab"
    lab.mkdir(exist_ok=True)
    with steps.step("python3 -m venv"):
        typed(f"{sys.executable} -m venv --clear env", place)
    with steps.step(f"pip install pipeplan[{extras}]"):
        typed(f"env/bin/pip install -q --no-index --find-links wheels '{wheel}[{extras}]'", place)
    if linked:
        inside = place / "env" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
        (inside / "torch_of_another.pth").write_text(sysconfig.get_path("purelib") + "\n")
    path = f"{place / 'env' / 'bin'}:{os.environ['PATH']}"
    with steps.step("pipeplan"):
        typed("pipeplan", lab, PATH=path)
    with steps.step("pipeplan doctor"):
        typed("pipeplan doctor", lab, PATH=path)
    made = subprocess.run(
        ["pipeplan", "init", "--force", "--workers", str(workers), "--json"],
        cwd=lab,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    measuring, planning, running = json.loads(made.stdout)["next"]
    for command in (measuring, f"{planning} --force"):
        with steps.step(command):
            typed(command, lab, PATH=path)
    with steps.step(f"{running.split()[0]}, to the first minibatch"):
        process = until_first_minibatch(f"{running.split()[0]} --epochs 1", lab, path)
    if process.wait():
        raise SystemExit(f"{running} ended with {process.returncode}")
    return steps


if __name__ == "__main__":
    main()
