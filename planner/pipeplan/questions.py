"""The functions of the Python API that ask more than one question of the solvers: `explain`, `sweep`, `replan`.

`pipeplan.api` has these functions under the same names. The functions import most modules only when they are called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from pipeplan.cluster_data.cluster import Cluster
from pipeplan.errors import InputError
from pipeplan.explanation.explain import Explanation, RobustnessSettings, explain_plan
from pipeplan.from_options.option_fields import OptionKeywords, checked_keywords
from pipeplan.plan.plan import Plan
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.replanning.replan import RELAXED, ReplanReport
from pipeplan.util.text import did_you_mean
from pipeplan.util.units import parse_rate, parse_size

SEARCH = Settings(solver="dp", certify=False, simplify=True)
"""Settings for the dynamic program alone, with simulation, as the commands `explain` and `sweep` use them."""


def explain(
    plan: Outcome | str | os.PathLike[str],
    *,
    profile: str | os.PathLike[str] | None = None,
    samples: int = 20,
    seed: int = 0,
    spread: float | None = None,
    settings: Settings = SEARCH,
    progress: Callable[[str], None] = lambda _: None,
) -> Explanation:
    """Explain a plan: what bounds its step time, the second best plan, and what other machines would gain.

    `plan` is an outcome, a plan folder or a plan.json. The profile of a plan file is read from the file `profile`, or
    searched for. The layers' times are drawn at random `samples` times, with the measured interquartile range, or with
    `spread` as the relative range. Raises `InputError`.
    """
    robustness = RobustnessSettings(samples, seed, spread)
    if isinstance(plan, Outcome):
        proof, step_s = plan.verdict.text, plan.predicted_s
        known, choice = (plan.plan,), plan.choice
        return explain_plan(
            plan.problem,
            settings,
            robustness,
            plan.plan,
            progress,
            proof=proof,
            step_s=step_s,
            known=known,
            choice=choice,
        )
    problem, read, proof, step_s = read_checked_plan(Path(plan), None if profile is None else Path(profile))
    return explain_plan(problem, settings, robustness, read, progress, proof=proof, step_s=step_s)


def read_checked_plan(path: Path, profile: Path | None) -> tuple[Problem, Plan, str, float]:
    """(problem, plan, clause on the proof, step time in seconds per minibatch) from a plan folder or plan.json."""
    from pipeplan.checker.verify import check_readable_plan
    from pipeplan.problem import plan_file

    problem, plan = plan_file.read_plan(path, profile)
    root = plan_file.read_plan_document(path)
    return problem, plan, check_readable_plan(root, problem.profile).proof, plan_file.PlanFile.of(root).step_s


def sweep(
    profile: Profile,
    clusters: Cluster | Sequence[Cluster],
    *,
    bandwidth: Mapping[str, Sequence[str | float]] | None = None,
    memory: Sequence[str | int] = (),
    microbatch: Sequence[int] = (),
    schedule: Sequence[str] = (),
    batch: int | None = None,
    staleness: float | None = None,
    price: float | None = None,
    settings: Settings = SEARCH,
    jobs: int = 1,
    **options: Any,
) -> list[dict[str, Any]]:
    """The best plan for every combination of the given values, as rows for a data frame.

    `clusters` has one cluster or several, as in `[pipeplan.cluster("A", servers=n) for n in (1, 2, 4)]`. `bandwidth`
    has rates by the name of a level, as text (`25 Gbit/s`) or in bytes/s. `memory` has memory sizes of a device, as
    text or in bytes. `batch` and `staleness` are as for `solve`. Without a `schedule` every point gets the plan that
    `solve` takes. `price` is the price of a server for an hour, by default that of the cluster. `options` are those of
    `solve`. Rows have the names of `pipeplan sweep --csv`, in seconds, bytes and bytes/s. If a point has no plan, `why`
    has the reason. With several `jobs`, points are solved in that many processes, and the script's own code must be
    under `if __name__ == "__main__":`. Raises `InputError`, and `KeyboardInterrupt` for Ctrl-C.
    """
    from pipeplan.sweeps.points import SweepAxes, SweepPoint, sweep_points
    from pipeplan.sweeps.rows import SweepRow, hourly_price, row_records
    from pipeplan.sweeps.sweep import PointAnswer, solve_points

    listed = [clusters] if isinstance(clusters, Cluster) else list(clusters)
    if not listed:
        raise InputError("sweep takes at least one cluster")
    axes = SweepAxes(
        {name: [_parsed(rate, parse_rate, name) for rate in rates] for name, rates in (bandwidth or {}).items()},
        [round(_parsed(size, parse_size, "memory")) for size in memory],
        microbatch,
        schedule,
    )
    shared = SweepPoint(profile, listed[0], batch, staleness=staleness, options=checked_keywords(options))
    points = sweep_points(shared, listed, axes)
    answers: dict[int, PointAnswer] = {}
    if not solve_points(points, settings, jobs, answers.__setitem__):
        raise KeyboardInterrupt
    return row_records(
        [SweepRow(point, answers[number], hourly_price(point, price)) for number, point in enumerate(points)]
    )


def _parsed(value: str | float, parse: Callable[[object, str], float], where: str) -> float:
    return parse(value, where) if isinstance(value, str) else float(value)


def replan(
    plan: str | os.PathLike[str] = "plan",
    *,
    lost: str | Sequence[str] = (),
    cluster: Cluster | None = None,
    relax: Sequence[str] = (),
    run: str | os.PathLike[str] | None = None,
    profile: str | os.PathLike[str] | None = None,
    microbatch: int | None = None,
    settings: Settings | None = None,
    output: str | os.PathLike[str] | None = None,
    force: bool = False,
    **options: Unpack[OptionKeywords],
) -> ReplanReport:
    """Solve again for the rest of a plan's cluster, with the options of the old plan except for those given here.

    `lost` names servers and workers (`server2`, `worker5`, `server1.worker0`); a new `cluster` replaces the old one
    instead. `relax` drops constraints of the old plan. Training resumes from the last checkpoint of the latest `run`.
    The new plan is in `report.outcome`. If `output` is given, the plan is written to this folder, and `report.commands`
    has the commands that resume training. `settings` are as for `solve`. Raises `InputError`, and `InfeasibleError` if
    no plan fits.
    """
    from pipeplan.rendering.plan_folder import refuse_to_overwrite_plan, write_plan
    from pipeplan.replanning.old_plan import read_old_plan, remaining_cluster, replanned_problem, solve_again
    from pipeplan.run_data.run_folder import latest_checkpoint

    for name in relax:
        if name not in RELAXED:
            raise InputError(f"there is no constraint {name!r} to relax; {did_you_mean(name, RELAXED)}")
    names = (lost,) if isinstance(lost, str) else tuple(lost)
    old_problem, old = read_old_plan(Path(plan), None if profile is None else Path(profile))
    remaining = remaining_cluster(old.cluster, names, cluster)
    problem = replanned_problem(old_problem, remaining, relax, microbatch, checked_keywords(options))
    folder = None if output is None else Path(output)
    if folder is not None:
        refuse_to_overwrite_plan(folder, force)
    checkpoint = None
    if not old.plan.inference:
        checkpoint = latest_checkpoint(old.folder, None if run is None else Path(run), problem.profile.graph_hash)
    outcome = solve_again(problem, replace(settings or Settings(), simplify=True))
    report = ReplanReport(old, remaining, names, outcome, None, checkpoint)
    if folder is None:
        return report
    write_plan(outcome, folder, force=force)
    return replace(report, folder=folder)
