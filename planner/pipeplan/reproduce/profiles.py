"""The profiles of the published rows: what PipeDream's authors measured where that is at hand, else estimates."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeplan import resources
from pipeplan.errors import InputError
from pipeplan.importers import pipedream
from pipeplan.profile_data import Profile
from pipeplan.reproduce.published import Published

MEASURED_AT = {"vgg16": 128, "alexnet": 256, "resnet50": 128, "gnmt8": 32, "gnmt16": 128}
"""Samples that the published profiles were measured with, which their format does not say.

The first dimension of their tensors does: the decoder's state of GNMT-8 has 131,072 bytes, 32 vectors of 1024 numbers
of 4 bytes, that of GNMT-16 524,288 (docs/estimate.md).
"""


@dataclass(frozen=True)
class Source:
    """A profile for one row, at the row's minibatch size."""

    profile: Profile
    published: bool
    """Measured by PipeDream's authors; else an estimate that pipeplan brings."""
    measured_at: int
    """The minibatch size that its times were taken at, before they were scaled in proportion."""

    @property
    def text(self) -> str:
        """What it is, in a few words."""
        kind = "published" if self.published else "estimated"
        scaled = self.measured_at != self.profile.minibatch
        return f"{kind} at {self.measured_at}" + (f", scaled to {self.profile.minibatch}" if scaled else "")


def folder_of(given: Path | None) -> Path | None:
    """The folder `pipedream` of reference data; an `InputError` where one was given that has none of its files."""
    if given is None:
        return None
    folder = given / "pipedream"
    if not any((folder / f"{name}.txt").is_file() for name in MEASURED_AT):
        raise InputError(f"{given} has no pipedream/vgg16.txt or the like: give the folder above PipeDream's profiles")
    return folder


def load(row: Published, folder: Path | None) -> Source:
    """The profile of a row: from `folder`, as PipeDream's profiler wrote it, else the bundled one."""
    file = folder / f"{row.profile}.txt" if folder is not None else None
    if file is not None and file.is_file():
        size = MEASURED_AT[row.profile]
        profile = pipedream.load(file, size, "V100")
        return Source(profile.rescaled(row.minibatch), True, size)
    profile = Profile.load(resources.folder("profiles") / f"{row.profile}-v100.json")
    return Source(profile.rescaled(row.minibatch), False, profile.minibatch)
