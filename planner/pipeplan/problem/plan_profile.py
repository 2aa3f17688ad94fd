"""Finds the profile that a plan.json was made from, by its digest and by the path that the plan recorded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile, bundled_profile_paths
from pipeplan.util.files import Node

PROFILE = "profile.json"


def profile_of_plan(root: Node, plan: Path, named: Path | None = None) -> Profile:
    """The profile with the digest that the plan.json at `plan` states, at the plan's minibatch size, with the
    times under the load of the plan's workers.

    If `named` is None, the profile is searched for where it was when the plan was made, first by its path from the plan
    folder and then by its absolute path; then in the plan's folder, its parent, the current folder, and among the
    bundled profiles. Raises `InputError` if no profile has that digest, or the one at `named` has another.
    """
    digest, minibatch = root["profile"]["digest"].text(), root["profile"]["minibatch"].integer(minimum=1)
    processes = root["profile"].get("processes")
    busy = 1 if processes is None else processes.integer(minimum=1)
    if named is not None:
        found = _with_digest(Profile.load(named), minibatch, busy, digest)
        if found is None:
            raise InputError(f"{named} is not the profile that {plan} was made from: their digests differ")
        return found
    path, relative = (_path(root["profile"].get(name)) for name in ("path", "relative_path"))
    damaged: InputError | None = None
    for candidate in dict.fromkeys(_candidates(plan, relative, path)):
        try:
            found = _with_digest(Profile.load(candidate), minibatch, busy, digest) if candidate.is_file() else None
        except InputError as error:
            damaged = damaged or error
            continue
        if found is not None:
            return found
    if damaged is not None:
        raise damaged
    where = "not beside it" if path is None else f"no longer at {path}, nor beside the plan"
    raise InputError(f"the profile that {plan} was made from is {where}: name it with --profile")


def profile_if_found(root: Node, plan: Path, named: Path | None = None) -> Profile | None:
    """Like `profile_of_plan`, but None if the profile is neither named nor found."""
    try:
        return profile_of_plan(root, plan, named)
    except InputError:
        if named is not None:
            raise
        return None


def _path(node: Node | None) -> Path | None:
    return None if node is None else Path(node.text())


def _candidates(plan: Path, relative: Path | None, recorded: Path | None) -> Iterator[Path]:
    # A copied project has both, and the profile of the copy names the job of the copy.
    if relative is not None:
        yield plan.parent.resolve() / relative
    if recorded is not None:
        yield recorded
    yield from (plan.parent / PROFILE, plan.parent.parent / PROFILE, Path(PROFILE))
    yield from bundled_profile_paths().values()


def _with_digest(profile: Profile, minibatch: int, busy: int, digest: str) -> Profile | None:
    """The profile at the minibatch size, with the times of `busy` workers, if it then has the digest.

    A size may be extrapolated with and without pessimistic times.
    """
    for pessimistic in (False, True):
        scaled = profile.under_load(busy).rescaled(minibatch, pessimistic=pessimistic)
        if scaled.digest() == digest:
            return scaled
    return None
