"""Reads a plan.json: the plan, and the problem that it was made for."""

from __future__ import annotations

import json
from pathlib import Path

from pipeplan.cluster_data import cluster_json
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.problem.options import Options
from pipeplan.problem.plan_profile import profile_of_plan
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.util.files import Node, read_document, read_text
from pipeplan.util.typed import decode

PLAN_FORMAT, PLAN_VERSION = "pipeplan-plan", 1


def is_plan(path: Path) -> bool:
    """Whether a path is a folder, which is taken for a plan folder, or a JSON file whose `format` is that of a plan."""
    if path.is_dir():
        return True
    try:
        document = json.loads(read_text(path))
    except (InputError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == PLAN_FORMAT


def read_plan(path: Path, profile_path: Path | None = None) -> tuple[Problem, Plan]:
    """The problem and the plan in a plan folder or plan.json, with the profile that it was made from.

    The profile is taken at the minibatch size of the plan. Without `profile_path` it is searched for by its digest.
    Raises an `InputError` where it is another profile or is not found, or where a file cannot be read.
    """
    root = read_plan_document(path)
    return plan_from_document(root, profile_of_plan(root, plan_file(path), profile_path))


def read_plan_document(path: Path) -> Node:
    """The content of a plan folder's plan.json, or of that file. Raises an `InputError` where there is none."""
    if not plan_file(path).is_file():
        raise InputError(f"{path} has no plan.json; `pipeplan solve` writes plan folders")
    return read_document(plan_file(path), PLAN_FORMAT, PLAN_VERSION)


def step_time_s(root: Node) -> float:
    """The pace that a plan.json states, in seconds per minibatch; in older ones that is the prediction by formulas."""
    stated = root.get("stated")
    return (root["prediction"] if stated is None else stated)["minibatch_s"].number()


def plan_file(path: Path) -> Path:
    """The path of the plan.json in a plan folder, or `path` itself where it is no folder."""
    return path / "plan.json" if path.is_dir() else path


def plan_from_document(root: Node, profile: Profile) -> tuple[Problem, Plan]:
    """The problem and the plan of a plan.json, given the profile that it was made from."""
    plan = Plan.from_json(root["plan"])
    return Problem(profile, cluster_json.cluster_from_json(root["cluster"]), options_of_plan(root, plan)), plan


def options_of_plan(root: Node, plan: Plan) -> Options:
    """The options that a plan.json names; all others have their defaults."""
    # The plan states these itself, under `plan`.
    of_plan = {"inference": plan.inference, "schedule": plan.schedule, "accumulate": plan.accumulate}
    stated = dict(root["options"].mapping())
    if stated.pop("shard_optimizer", False) is True:  # plans before FSDP
        stated["sharding"] = "zero1"
    return decode(Node(stated | of_plan, root["options"].where), Options)
