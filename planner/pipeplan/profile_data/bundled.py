"""Finds a profile by the name that a user gives: a file, or a bundled profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pipeplan.errors import InputError
from pipeplan.profile_data.profile import Profile
from pipeplan.util import files
from pipeplan.util.text import did_you_mean


def bundled_profile_paths() -> dict[str, Path]:
    """The paths of the bundled profiles, by name."""
    return {path.stem: path for path in sorted(files.bundled_folder("profiles").glob("*.json"))}


def load_profile(name: str) -> Profile:
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
    if name in bundled_profile_paths():
        return replace(Profile.load(bundled_profile_paths()[name]), file="")  # found by its name on any machine
    if path.suffix == ".json" or len(path.parts) > 1 or path.exists():
        return Profile.load(path)
    raise InputError(f"there is no profile {name!r}; {did_you_mean(name, bundled_profile_paths())} (or give a file)")
