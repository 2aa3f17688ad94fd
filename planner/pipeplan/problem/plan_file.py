"""Reads a plan.json: the plan, and the problem that it was made for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeplan.cluster_data import cluster_json
from pipeplan.errors import InputError
from pipeplan.plan.plan import Plan
from pipeplan.problem.plan_profile import profile_of_plan
from pipeplan.problem.problem import Options, Problem
from pipeplan.profile_data.profile import Profile
from pipeplan.util.files import Node, read_document, read_text

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


def plan_file(path: Path) -> Path:
    """The path of the plan.json in a plan folder, or `path` itself where it is no folder."""
    return path / "plan.json" if path.is_dir() else path


def plan_from_document(root: Node, profile: Profile) -> tuple[Problem, Plan]:
    """The problem and the plan of a plan.json, given the profile that it was made from."""
    plan = Plan.from_json(root["plan"])
    return Problem(profile, cluster_json.cluster_from_json(root["cluster"]), _options(root["options"], plan)), plan


def _options(node: Node, plan: Plan) -> Options:
    """The options that plan.json names; all others have their defaults."""
    stated = {name: read_field(value) for name, read_field in OPTION_READERS.items() if (value := node.get(name))}
    # The plan states these itself, under `plan`.
    stated |= {"inference": plan.inference, "schedule": plan.schedule, "accumulate": plan.accumulate}
    return Options(**stated)


def _count(node: Node) -> int:
    return node.integer(minimum=1)


def _names(node: Node) -> tuple[str, ...]:
    return tuple(name.text() for name in node.items())


def _groups(node: Node) -> tuple[tuple[str, ...], ...]:
    return tuple(_names(group) for group in node.items())


def _pins(node: Node) -> tuple[tuple[str, int], ...]:
    pins = []
    for pin in node.items():
        if len(pin.items()) != 2:
            pin.fail(f"expected a layer and its stage, found {len(pin.items())} values")
        layer, stage = pin.items()
        pins.append((layer.text(), stage.integer(minimum=1)))
    return tuple(pins)


OPTION_READERS: dict[str, Callable[[Node], Any]] = {
    "inference": Node.boolean,
    "overlap": Node.number,
    "memory": Node.boolean,
    "stages": _count,
    "max_replicas": _count,
    "allow_copies": Node.boolean,
    "schedule": Node.text,
    "accumulate": _count,
    "correction": Node.text,
    "recompute": Node.boolean,
    "contention": Node.boolean,
    "boundary": Node.text,
    "max_stages": _count,
    "max_workers": _count,
    "pins": _pins,
    "together": _groups,
    "no_cut_after": _names,
    "grid": Node.boolean,
}
"""A function that reads the JSON value of each field of `Options`."""
