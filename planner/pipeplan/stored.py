"""A plan that was written before, with the problem that it was made for."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from pipeplan import cluster_json
from pipeplan.errors import InputError
from pipeplan.files import Node, read_document
from pipeplan.plan import Plan
from pipeplan.problem import Options, Problem
from pipeplan.profile_data import Profile

PLAN_FORMAT, PLAN_VERSION = "pipeplan-plan", 1


def is_plan(path: Path) -> bool:
    """Whether this is a plan's folder, or a plan.json by its own word."""
    if path.is_dir():
        return True
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.get("format") == PLAN_FORMAT


def read(path: Path, profile_path: Path) -> tuple[Problem, Plan]:
    """The plan in a folder or file and its problem, for the profile that it was made from.

    Raises `InputError` where the profile is another one.
    """
    root = document(path)
    profile = Profile.load(profile_path)
    minibatch = root["profile"]["minibatch"].integer(minimum=1)
    if minibatch != profile.minibatch:
        profile = profile.rescaled(minibatch)
    if profile.digest() != root["profile"]["digest"].text():
        raise InputError(f"{file_of(path)} was not made from {profile_path}: their digests differ")
    return of(root, profile)


def document(path: Path) -> Node:
    """The plan.json in a folder, or that file."""
    if not file_of(path).is_file():
        raise InputError(f"{path} has no plan.json; `pipeplan solve` writes plan folders")
    return read_document(file_of(path), PLAN_FORMAT, PLAN_VERSION)


def file_of(path: Path) -> Path:
    """The plan.json of a plan's folder, or the file itself."""
    return path / "plan.json" if path.is_dir() else path


def of(root: Node, profile: Profile) -> tuple[Problem, Plan]:
    """What a plan.json says, and the problem that it was made for, with the profile that it was made from."""
    plan = Plan.from_json(root["plan"])
    return Problem(profile, cluster_json.from_json(root["cluster"]), _options(root["options"], plan)), plan


def _options(node: Node, plan: Plan) -> Options:
    """The options that plan.json names; all others have their defaults."""
    names = {field.name for field in fields(Options)}
    found = {name: as_it_is(one) for name, as_it_is in READERS.items() if name in names and (one := node.get(name))}
    # These are said by the plan itself, which knows them better.
    found |= {"inference": plan.inference, "schedule": plan.schedule, "accumulate": plan.accumulate}
    return Options(**found)


def _count(node: Node) -> int:
    return node.integer(minimum=1)


def _names(node: Node) -> tuple[str, ...]:
    return tuple(name.text() for name in node.items())


def _groups(node: Node) -> tuple[tuple[str, ...], ...]:
    return tuple(_names(group) for group in node.items())


def _pins(node: Node) -> tuple[tuple[str, int], ...]:
    found = []
    for pin in node.items():
        if len(pin.items()) != 2:
            pin.fail(f"expected a layer and its stage, found {len(pin.items())} values")
        layer, stage = pin.items()
        found.append((layer.text(), stage.integer(minimum=1)))
    return tuple(found)


READERS: dict[str, Callable[[Node], Any]] = {
    "inference": Node.boolean,
    "overlap": Node.number,
    "memory": Node.boolean,
    "stages": _count,
    "max_replicas": _count,
    "allow_copies": Node.boolean,
    "schedule": Node.text,
    "accumulate": _count,
    "recompute": Node.boolean,
    "contention": Node.boolean,
    "boundary": Node.text,
    "max_stages": _count,
    "max_workers": _count,
    "pins": _pins,
    "together": _groups,
    "no_cut_after": _names,
    "grid": Node.boolean,
    "several": Node.boolean,
}
"""Every field of the options."""
