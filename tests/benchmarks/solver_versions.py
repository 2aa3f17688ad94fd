"""Whether the integer program works with the oldest and the newest versions of PuLP and HiGHS that are allowed.

    python tests/benchmarks/solver_versions.py [--keep FOLDER] [--python PYTHON …]

Makes an environment of its own for every pair of versions, runs the tests of the integer program in it, and tries the
two findings about HiGHS that the code works around. PuLP 4 needs Python 3.12: its rows are left out where no such
interpreter is found. It takes some five minutes and a package index.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/planner/solvers/ilp", "tests/planner/solvers/test_solvers.py")
REST = ("click>=8.1", "jinja2>=3.1", "numpy>=1.26", "rich>=13.7", "pytest>=8.0")


@dataclass(frozen=True)
class Versions:
    """One environment."""

    name: str
    packages: tuple[str, ...]
    least_python: tuple[int, int] = (3, 11)


ALLOWED = (
    Versions("oldest", ("pulp==3.2.0", "highspy==1.8.0")),
    Versions("newest before PuLP 4", ("pulp<4", "highspy")),
    # PuLP 4 brings no CBC; cbcbox is where it looks for one.
    Versions("oldest PuLP 4", ("pulp==4.0.0", "highspy==1.8.0", "cbcbox"), (3, 12)),
    Versions("newest", ("pulp", "highspy", "cbcbox"), (3, 12)),
)

PROBE = """
from importlib.metadata import version

import highspy
from instances import drawn, random_instance

from pipeplan.problem.cuts import enumerate_cuts
from pipeplan.solvers.dp import dynamic_program
from pipeplan.solvers.ilp import integer_program
from pipeplan.solvers.ilp import backend

print(f"PuLP {version('pulp')}, highspy {version('highspy')}")

# What `backend` adds to HiGHS is left out: its first answer counts, with presolve or without.
for finding, seed, layers in (("feasible called infeasible", 20611, 5), ("worse plan called optimal", 612, 6)):
    problem = drawn(seed, lambda number: random_instance(number, layers=layers))[1]
    best = dynamic_program.solve(problem, enumerate_cuts(problem, 1000)).objective_s
    for presolve in ("on", "off"):
        backend._highs = lambda program, seconds, gap, confirm: backend._highs_once(program, seconds, gap, presolve)
        found = integer_program.solve(problem, integer_program.IlpLimits(), best if seed == 20611 else None)
        right = found.status == "optimal" and abs(found.objective_s - best) <= 1e-6 * best
        print(f"  {finding}, presolve {presolve}: {'no' if right else 'YES'}")

# 1,000 fixed amounts of 5e-10 add up to 5e-7.
model = highspy.Highs()
model.setOptionValue("output_flag", False)
model.addVar(0.0, highspy.kHighsInf)
model.changeColCost(0, 1.0)
for _ in range(1000):
    model.addVar(1.0, 1.0)
model.addRow(0.0, highspy.kHighsInf, 1001, list(range(1001)), [1.0, *[-5e-10] * 1000])
model.run()
total = model.getInfo().objective_function_value
print(f"  coefficients of 5e-10: {'kept' if abs(total - 5e-7) < 1e-9 else 'DROPPED'}")
"""


def main() -> None:
    """Try all versions that this machine has a Python for. Exits with 1 if the tests fail with any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--keep", type=Path, help="make the environments in this folder, and leave them there")
    parser.add_argument("--python", action="append", default=[], help="an interpreter to try; can be repeated")
    arguments = parser.parse_args()
    installed = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")).glob("versions/3.1[2-9].*/bin/python")
    pythons = [*arguments.python, sys.executable, "python3.12", "python3.13", *sorted(map(str, installed))]
    folder = arguments.keep or Path(tempfile.mkdtemp())
    try:
        failed = [one.name for one in ALLOWED if not _holds(one, folder, pythons)]
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder)
    sys.exit(f"the tests fail with: {', '.join(failed)}" if failed else 0)


def _holds(versions: Versions, folder: Path, pythons: list[str]) -> bool:
    """Whether the tests pass with these versions, or no Python for them is here."""
    python = next((one for one in pythons if _version(one) >= versions.least_python), None)
    if python is None:
        print(f"{versions.name}: no Python {'.'.join(map(str, versions.least_python))} is here", flush=True)
        return True
    place = folder / versions.name.replace(" ", "-")
    inside = place / "bin" / "python"
    if not inside.exists():
        subprocess.run([python, "-m", "venv", place], check=True)
        subprocess.run([inside, "-m", "pip", "install", "--quiet", *versions.packages, *REST], check=True)
    paths = [str(ROOT / name) for name in ("planner", "launch", "tests/support")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    print(f"{versions.name}: ", end="", flush=True)
    subprocess.run([inside, "-c", PROBE], env=environment, check=True)
    pytest = [inside, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-m", "not slow", *TESTS]
    done = subprocess.run(pytest, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(f"  tests: {done.stdout.strip().splitlines()[-1]}", flush=True)
    return done.returncode == 0


def _version(python: str) -> tuple[int, int]:
    """The version of an interpreter; (0, 0) where there is none of that name."""
    code = "import sys; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0, 0
    major, minor = map(int, done.stdout.split())
    return major, minor


if __name__ == "__main__":
    main()
