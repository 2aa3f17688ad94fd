"""What must not get worse in the planner: answers, gaps and times, in one table.

    python tests/evaluation/planner_figures.py [--only ROW] [--chains 70] [--llama PROFILE]

Every row runs in a process of its own. Times are CPU seconds, so that other work on the machine matters little, and
limits of searches count CPU seconds too. `--llama` names a profile of Llama-3 8B on A100s, as
tests/evaluation/expert_table.py makes it; without one that row is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "tests" / "benchmarks"
CPU_CLOCK = "import time; time.perf_counter = time.monotonic = time.process_time; "
"""Makes deadlines count CPU seconds."""
COMMAND = CPU_CLOCK + "import sys; from pipeplan.cli import main; sys.argv[0] = 'pipeplan'; main()"

A100_CLUSTER = (Path(__file__).parent / "expert" / "clusters" / "a100-4x8.toml").read_text(encoding="utf-8")
GNMT_CLUSTER = """format = "pipeplan-cluster"
version = 1
name = "16 x 4 V100"
[device]
name = "V100 16 GB"
kind = "cuda"
memory = "16 GiB"
[[level]]
name = "server"
count = 4
bandwidth = "12 GB/s"
[[level]]
name = "cluster"
count = 16
bandwidth = "10 Gbit/s"
"""
TIGHT = """
from dataclasses import replace
from proofs import chain, even_cluster
from pipeplan.errors import PipeplanError
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem

options = Options(schedule="1f1b-flush", accumulate=128, recompute=False)
problem = Problem(chain(99), even_cluster(8, 4, 4, memory_gib={gib}), options)
try:
    outcome = solve(problem, Settings(solver="dp", time_limit_s=20.0))
    print(f"{{outcome.plan.config[:40]}}, gap {{outcome.gap:.1%}}")
except PipeplanError as error:
    print(f"no plan: {{str(error)[:80]}}")
"""
TIGHT_GIB = 1.75
"""Memory of a worker, in GiB, at which few plans of the chain fit."""


def run(arguments: Sequence[str], folder: Path | None = None) -> tuple[str, float]:
    """The standard output of a command, and its CPU seconds, children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=folder, env=environment, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return done.stdout if done.returncode == 0 else f"exit code {done.returncode}: {done.stderr[-200:]}", cpu_s


def last_line(text: str) -> str:
    """The last line of a text that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def bundled() -> str:
    """The 24 bundled answers: how many are proven, and the slowest."""
    text, cpu_s = run([sys.executable, str(BENCHMARKS / "proofs.py"), "bundled"])
    return f"{last_line(text)}; {cpu_s:.0f} CPU s together"


def chains(count: int) -> str:
    """Random transformers, 20 CPU seconds each: how many are proven or within 1%."""
    command = [sys.executable, str(BENCHMARKS / "proofs.py"), "--count", str(count)]
    return last_line(run(command)[0])


def scale(name: str) -> str:
    """One row of the large instances."""
    text, _ = run([sys.executable, str(BENCHMARKS / "proofs.py"), "scale", "--only", name, "--seconds", "120"])
    values = last_line(text).removeprefix(name).split()
    return f"{values[0]} CPU s, {values[2]} GiB, gap {values[3]}" if len(values) > 3 else last_line(text)


def asked(profile: str, cluster: str, batch: int | None, limit_s: int) -> str:
    """An answer of `pipeplan solve` for a cluster file, with its gap and CPU seconds."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cluster.toml").write_text(cluster, encoding="utf-8")
        command = [sys.executable, "-c", COMMAND, "solve", profile, "--cluster", "cluster.toml", "--no-write", "--json"]
        command += ["--time-limit", str(limit_s), *([] if batch is None else ["--batch", str(batch)])]
        text, cpu_s = run(command, folder)
    try:
        answer = json.loads(text)
    except ValueError:
        return last_line(text)
    plan = answer["plan"]["config"]
    return f"{plan}, gap {answer['gap']:.1%}, {cpu_s:.1f} CPU s with a limit of {limit_s}"


def tight() -> str:
    """A chain of 99 layers on 8 x 4 x 4 workers with a flush, where few plans fit in memory."""
    text, cpu_s = run([sys.executable, "-c", CPU_CLOCK + TIGHT.format(gib=TIGHT_GIB)])
    return f"{last_line(text)}, {cpu_s:.1f} CPU s"


def whole_process() -> str:
    """`pipeplan solve vgg16-v100 --cluster A` as a whole process, CPU seconds: the least of three."""
    command = [sys.executable, "-m", "pipeplan", "solve", "vgg16-v100", "--cluster", "A", "--no-write"]
    return f"{min(run(command)[1] for _ in range(3)):.1f} CPU s"


def helps() -> str:
    """Wall-clock seconds of `--help` and `solve --help`, the least of five, and whether torch is imported."""
    found = []
    for arguments in (["--help"], ["solve", "--help"]):
        times = []
        for _ in range(5):
            began = time.perf_counter()
            run([sys.executable, "-m", "pipeplan", *arguments])
            times.append(time.perf_counter() - began)
        text, _ = run([sys.executable, "-X", "importtime", "-m", "pipeplan", *arguments])
        found.append(f"{' '.join(arguments)} {min(times):.2f} s{', torch' if ' torch' in text.split() else ''}")
    return "; ".join(found)


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORD", help="only rows whose name has this word")
    parser.add_argument("--chains", type=int, default=70, help="how many random transformers")
    parser.add_argument("--llama", metavar="PROFILE", help="a profile of Llama-3 8B on A100s")
    given = parser.parse_args()
    rows: dict[str, Callable[[], str]] = {
        "help": helps,
        "vgg16 on A, whole process": whole_process,
        "bundled answers": bundled,
        "chain of 99 layers, tight": tight,
        "GNMT-16 on 16 x 4 V100": lambda: asked("gnmt16-v100", GNMT_CLUSTER, None, 30),
        "1,000 x 4,096": lambda: scale("1,000 x 4,096"),
        "2,000 x 131,072 to 1%": lambda: scale("2,000 x 131,072 to 1%"),
        "3,000 x 16,384": lambda: scale("3,000 x 16,384"),
        "random transformers": lambda: chains(given.chains),
    }
    if given.llama:
        profile = str(Path(given.llama).resolve())
        rows["Llama-3 8B on 4 x 8 A100"] = lambda: asked(profile, A100_CLUSTER, 2048, 20)
    for name, row in rows.items():
        if given.only is None or given.only in name:
            print(f"{name:30} {row()}", flush=True)


if __name__ == "__main__":
    main()
