"""What it costs to stay with torch.distributed.pipelining: the best plan that it can express, beside the best of all.

    .venv/bin/python tests/benchmarks/exports.py [--accumulate 32] [PROFILE …]

For bundled profiles on the bundled clusters, predicted: samples per second of the best plan for each freedom. `any`:
any plan of the executor, asynchronous (1F1B with weight stashing). `flush`: any plan by 1F1B with a flush after
--accumulate minibatches. `grid`: such a plan with as many replicas of every stage. `torch-pipelining`: what
`pipeplan solve --for torch-pipelining` finds. By the DP alone; a minute for all.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from pipeplan.cluster_data import cluster_toml
from pipeplan.errors import PipeplanError
from pipeplan.exports.target import export_target
from pipeplan.plan.schedules import FLUSH
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.util import files

PROFILES = ("vgg16", "alexnet", "resnet50", "awd-lm")
CLUSTERS = ("A", "B")
FREEDOMS = ("any", "flush", "grid", "torch-pipelining")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("profiles", nargs="*", default=PROFILES, metavar="PROFILE")
    parser.add_argument("--accumulate", type=int, default=32)
    given = parser.parse_args()
    print(f"| profile | cluster | {' | '.join(FREEDOMS)} |")
    print("|---|---|" + "---|" * len(FREEDOMS))
    for name in given.profiles:
        profile = Profile.load(files.bundled_folder("profiles") / f"{name}-v100.json")
        for cluster in CLUSTERS:
            cells = [cell(profile, cluster, freedom, given.accumulate) for freedom in FREEDOMS]
            print(f"| {name} | {cluster} | {' | '.join(cells)} |", flush=True)


def cell(profile: Profile, cluster: str, freedom: str, accumulate: int) -> str:
    """The best plan and its pace, or why there is none."""
    try:
        options = options_of(profile, freedom, accumulate)
        found = solve(
            Problem(profile, cluster_toml.load_cluster(cluster), options), Settings(solver="dp", certify=False)
        )
    except PipeplanError as error:
        return str(error).split(":")[0]
    rate = profile.minibatch / found.predicted_s
    if freedom not in ("any", "flush", "grid"):
        export_target(freedom).refuse(found.problem, found.plan)
    return f"{rate:.0f} ({found.plan.config})"


def options_of(profile: Profile, freedom: str, accumulate: int) -> Options:
    """The options of a column."""
    if freedom == "any":
        return Options()
    flush = Options(schedule=FLUSH, accumulate=accumulate)
    if freedom == "flush":
        return flush
    if freedom == "grid":
        return replace(flush, grid=True, allow_copies=False)
    return export_target(freedom).restrict(profile, flush)


if __name__ == "__main__":
    main()
