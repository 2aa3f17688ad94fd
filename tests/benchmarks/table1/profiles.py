"""Profiles for the rows: those that PipeDream's authors measured, or bundled estimates where these are missing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeplan.errors import InputError
from pipeplan.importers import pipedream
from pipeplan.profile_data.profile import Profile
from pipeplan.util import files
from table1.published import PublishedRow

MEASURED_AT = {"vgg16": 128, "alexnet": 256, "resnet50": 128, "gnmt8": 32, "gnmt16": 128}
"""Minibatch size of the published profiles. Their format does not state it.

The first dimension of their tensors shows it: the decoder's state of GNMT-8 has 131,072 bytes, 32 vectors of 1024
numbers of 4 bytes, that of GNMT-16 524,288 (docs/estimate.md).
"""


@dataclass(frozen=True)
class ProfileSource:
    """A profile for one row, at the row's minibatch size."""

    profile: Profile
    published: bool
    """Whether PipeDream's authors measured it. Otherwise it is a bundled estimate."""
    measured_at: int
    """The minibatch size of the measurement, before times were scaled in proportion."""

    @property
    def text(self) -> str:
        """A few words on the origin: `published at 128, scaled to 64`."""
        kind = "published" if self.published else "estimated"
        scaled = self.measured_at != self.profile.minibatch
        return f"{kind} at {self.measured_at}" + (f", scaled to {self.profile.minibatch}" if scaled else "")


def folder_of(reference: Path | None) -> Path | None:
    """The folder `pipedream` inside a folder of reference data. Raises `InputError` where it has no profile."""
    if reference is None:
        return None
    folder = reference / "pipedream"
    if not any((folder / f"{name}.txt").is_file() for name in MEASURED_AT):
        raise InputError(
            f"{reference} has no pipedream/vgg16.txt or the like: give the folder above PipeDream's profiles"
        )
    return folder


def profile_of(row: PublishedRow, folder: Path | None) -> ProfileSource:
    """The profile of a row at the row's minibatch size: from `folder`, else the bundled one."""
    file = folder / f"{row.profile}.txt" if folder is not None else None
    if file is not None and file.is_file():
        size = MEASURED_AT[row.profile]
        profile = pipedream.read_pipedream_profile(file, size, "V100")
        return ProfileSource(profile.rescaled(row.minibatch), True, size)
    profile = Profile.load(files.bundled_folder("profiles") / f"{row.profile}-v100.json")
    return ProfileSource(profile.rescaled(row.minibatch), False, profile.minibatch)
