"""Reads the plan to be replaced, builds the problem for the remaining cluster, and solves it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipeplan.checker.document import PlanDocument
from pipeplan.checker.model import checked_model
from pipeplan.checker.structure import check_structure
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.errors import InfeasibleError, InputError
from pipeplan.from_options.option_fields import default_overlap
from pipeplan.plan.schedules import ACCUMULATING
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Report, Settings
from pipeplan.planning.solve import solve
from pipeplan.problem import plan_file
from pipeplan.problem.options import Options
from pipeplan.problem.plan_profile import profile_of_plan
from pipeplan.problem.problem import Problem
from pipeplan.replanning.remaining_cluster import RemainingCluster, remove_workers, workers_named
from pipeplan.replanning.replan import OldPlan, helpful_options, relax_options
from pipeplan.util.deadline import Deadline


def read_old_plan(path: Path, profile_file: Path | None = None) -> tuple[Problem, OldPlan]:
    """The problem that the plan in a folder or plan.json was made for, and the plan itself.

    Raises `InputError` if the structure of the plan is wrong, or its profile is not found.
    """
    root, file = plan_file.read_plan_document(path), plan_file.plan_file(path)
    profile = profile_of_plan(root, file, profile_file)
    document = PlanDocument.of(root)
    try:
        check_structure(document, checked_model(profile, document))
    except InputError as error:
        raise InputError(f"{file} cannot be replanned: {error}") from None
    problem, plan = plan_file.plan_from_document(root, profile)
    return problem, OldPlan(file.parent, plan, problem.cluster, profile.minibatch, document.step_s)


def remaining_cluster(old: Cluster, lost: Collection[str], instead: Cluster | None) -> RemainingCluster:
    """The cluster without the lost servers and workers, or the cluster `instead` that replaces it.

    Raises `InputError` unless exactly one of `lost` and `instead` is given.
    """
    if instead is not None:
        if lost:
            raise InputError("--lost refers to the plan's cluster, which --cluster replaces: give one of them")
        return RemainingCluster(instead, (), ())
    if not lost:
        raise InputError("say what is gone, as in --lost server1, or what there is now with --cluster")
    return remove_workers(old, workers_named(tuple(lost), old))


def overriding_options(old: Options, fields: Mapping[str, Any]) -> Options:
    """The old options with other values for some fields. Minibatches per update are kept if the schedule needs them."""
    schedule, accumulate = fields.get("schedule", old.schedule), fields.get("accumulate")
    if accumulate is None and schedule in ACCUMULATING:
        accumulate = old.accumulate
    return replace(old, **{**fields, "accumulate": accumulate})


def replanned_problem(
    old: Problem, remaining: RemainingCluster, relax: Collection[str], minibatch: int | None, fields: Mapping[str, Any]
) -> Problem:
    """The old problem on the remaining cluster, without the options that `relax` names, and with other `fields`."""
    profile = old.profile if minibatch in (None, old.profile.minibatch) else old.profile.rescaled(minibatch or 0)
    options = overriding_options(relax_options(old.options, relax), fields)
    kind = remaining.cluster.device.kind
    if fields.get("overlap") is None and kind != old.cluster.device.kind:
        options = replace(options, overlap=default_overlap(kind))
    if options.stages is not None and options.stages > remaining.cluster.workers:
        count = remaining.cluster.workers
        raise InputError(
            f"{options.stages} stages were asked for, and {count} worker{'s are' if count > 1 else ' is'} left: ask "
            "for fewer with --stages, or leave it to the solvers with --relax stages"
        )
    return Problem(profile, remaining.cluster, options)


def solve_again(problem: Problem, settings: Settings, report: Report | None = None) -> Outcome:
    """The outcome of a problem. If nothing fits, the `InfeasibleError` names the options that would help."""
    deadline = Deadline.after(settings.time_limit_s)
    try:
        # Part of the time is reserved for finding options that would help if there is no plan.
        return solve(problem, settings, report=report, deadline=deadline.share(0.8))
    except InfeasibleError as error:
        helps = helpful_options(problem, deadline)
        if not helps:
            raise
        raise InfeasibleError(f"{error}; of the options here {', '.join(helps)} would do") from None
