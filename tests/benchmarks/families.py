"""The plans for seven families of models on four servers of eight A100s, beside what other trainers' users would do.

    .venv/bin/python tests/benchmarks/families.py [NAME …] [--minutes 1]

Layers are estimated, not measured (docs/estimate.md). For each model: the time of the estimate and of the solve, the
plan that `pipeplan solve` takes by default, its distance from the best plan, and the other candidates at its batch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pipeplan
from pipeplan.util.units import show_pace, show_size

JOBS = Path(__file__).with_name("families_jobs.py")
NAMES = ("gpt2_xl", "llama_7b", "qwen2_7b", "bert_large", "t5_large", "vit_large", "resnet_50")
CLUSTER = """
format = "pipeplan-cluster"
version = 1
name = "4x8"

[device]
name = "A100 80 GB"
kind = "cuda"
memory = "76 GiB"

[[level]]
name = "server"
count = 8
bandwidth = "250 GB/s"
latency = "3 us"

[[level]]
name = "network"
count = 4
bandwidth = "100 Gbit/s"
latency = "20 us"
"""


def show(name: str, cluster: pipeplan.Cluster, minutes: float) -> None:
    """Print a row for one model."""
    began = time.monotonic()
    profile = pipeplan.profile(f"{JOBS}:{name}", device="a100")
    estimated = time.monotonic() - began
    began = time.monotonic()
    settings = pipeplan.Settings(time_limit_s=60 * minutes)
    outcome = pipeplan.solve(profile, cluster, settings=settings)
    solved = time.monotonic() - began
    weights = sum(layer.parameter_bytes for layer in profile.layers)
    samples = outcome.problem.profile.minibatch / outcome.predicted_s
    print(
        f"{name:11} {len(profile.layers):5} layers {show_size(weights):>9}  {outcome.plan.config:16} "
        f"{outcome.plan.schedule:14} microbatch {outcome.problem.profile.minibatch:<3} {show_pace(samples):>6} "
        f"samples/s  estimate {estimated:.0f} s, solve {solved:.0f} s\n"
        f"            {outcome.verdict.text[:140]}",
        flush=True,
    )
    choice = outcome.choice
    for one in () if choice is None else (*choice.rivals, *((choice.stale,) if choice.stale else ())):
        print(f"              {one.kind}: {one.text}", flush=True)


def main() -> None:
    """Print the rows of the models that are named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of: {', '.join(NAMES)}")
    parser.add_argument("--minutes", type=float, default=1.0, help="limit of each solve (default: 1)")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"there is no model {', '.join(sorted(unknown))}")
    here = Path("families-4x8.toml")
    here.write_text(CLUSTER, encoding="utf-8")
    try:
        cluster = pipeplan.cluster(here)
    finally:
        here.unlink()
    for name in arguments.names or NAMES:
        show(name, cluster, arguments.minutes)


if __name__ == "__main__":
    main()
