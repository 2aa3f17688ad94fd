"""Finds a profile by the name that a user gives: a file, or a bundled profile."""

from __future__ import annotations

from pathlib import Path

from pipeplan import resources
from pipeplan.errors import InputError
from pipeplan.profile_data import Profile
from pipeplan.suggest import did_you_mean


def bundled() -> dict[str, Path]:
    """The paths of the bundled profiles, by name."""
    return {path.stem: path for path in sorted(resources.folder("profiles").glob("*.json"))}


def read(name: str) -> Profile:
    """The profile in the file `name`, otherwise the bundled profile of that name.

    Raises an `InputError` where there is neither, or where the file is not a valid profile.
    """
    path = Path(name)
    if path.suffix == ".py" or ".py:" in name:
        job = name if ":" in name else f"{name}:build"
        raise InputError(f"{name} is a job, not a profile: measure it first, with pipeplan profile {job}")
    if path.suffix == ".toml" and path.is_file():
        raise InputError(f"{name} is not a profile, which ends in .json: a cluster file goes with --cluster")
    if path.is_file():
        return Profile.load(path)
    if name in bundled():
        return Profile.load(bundled()[name])
    if path.suffix == ".json" or len(path.parts) > 1 or path.exists():
        return Profile.load(path)
    raise InputError(f"there is no profile {name!r}; {did_you_mean(name, bundled())} (or give a file)")
