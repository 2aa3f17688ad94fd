"""Finds the profile that a plan.json was made from, by its digest and by the path that the plan recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from pipeplan.errors import InputError
from pipeplan.profile_data.profile import JobFile, Profile, bundled_profile_paths
from pipeplan.util.files import Node
from pipeplan.util.typed import Natural, Positive, decode

PROFILE = "profile.json"


class PlanProfile(Struct, frozen=True):
    """The field `profile`: the profile that the plan was made from."""

    digest: str
    minibatch: Positive
    model: str
    kind: str = ""
    how: str = ""
    ref: str = ""
    file: JobFile | None = None
    path: str | None = None
    relative_path: str | None = None
    threads: Natural = 1
    processes: Positive = 1
    """Number of workers that were busy on the machine while the profile was measured, including the measured one."""


def profile_of_plan(root: Node, plan: Path, named: Path | None = None) -> Profile:
    """The profile that the plan.json at `plan` was made from, identified by its digest.

    The profile has the plan's minibatch size, and the times under the load of the plan's workers. If `named` is None,
    the search goes through the recorded relative and absolute paths, the plan's folder, its parent, the current folder,
    and the bundled profiles. Raises `InputError` if no profile has that digest, or if the profile at `named` has
    another digest.
    """
    stated = decode(root["profile"], PlanProfile)
    if named is not None:
        if (found := _with_digest(Profile.load(named), stated)) is None:
            raise InputError(f"{named} is not the profile that {plan} was made from: their digests differ")
        return found
    damaged: InputError | None = None
    for candidate in dict.fromkeys(_candidates(plan, stated)):
        try:
            found = _with_digest(Profile.load(candidate), stated) if candidate.is_file() else None
        except InputError as error:
            damaged = damaged or error
            continue
        if found is not None:
            return found
    if damaged is not None:
        raise damaged
    where = "not beside it" if stated.path is None else f"no longer at {stated.path}, nor beside the plan"
    raise InputError(f"the profile that {plan} was made from is {where}: name it with --profile")


def profile_if_found(root: Node, plan: Path, named: Path | None = None) -> Profile | None:
    """Like `profile_of_plan`, but None if the profile is neither named nor found."""
    try:
        return profile_of_plan(root, plan, named)
    except InputError:
        if named is not None:
            raise
        return None


def _candidates(plan: Path, stated: PlanProfile) -> Iterator[Path]:
    # Try the relative path first: in a copied project it leads to the copied profile, which names the copied job.
    if stated.relative_path is not None:
        yield plan.parent.resolve() / stated.relative_path
    if stated.path is not None:
        yield Path(stated.path)
    yield from (plan.parent / PROFILE, plan.parent.parent / PROFILE, Path(PROFILE))
    yield from bundled_profile_paths().values()


def _with_digest(profile: Profile, stated: PlanProfile) -> Profile | None:
    """The profile at the plan's minibatch size and number of busy workers, if it then has the plan's digest; else None.

    The plan may have extrapolated the size with or without pessimistic times, so both are tried.
    """
    for pessimistic in (False, True):
        scaled = profile.under_load(stated.processes).rescaled(stated.minibatch, pessimistic=pessimistic)
        if scaled.digest() == stated.digest:
            return scaled
    return None
