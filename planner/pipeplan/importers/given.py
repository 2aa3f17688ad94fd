"""What the user says of a foreign file that its format leaves out, and where the imported figures come from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pipeplan._version import __version__
from pipeplan.errors import InputError
from pipeplan.profile_data import LARGEST_MINIBATCH, Provenance

UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6}
"""How many of each make a second: dividing by these is exact where multiplying by 1e-3 is not."""


@dataclass(frozen=True)
class Given:
    """Options of `pipeplan import` for a profile; None or empty where the user said nothing."""

    minibatch: int | None = None
    time_unit: str | None = None
    bandwidth: float | None = None
    """Bytes/s, for a format that has the time of a transfer and not its bytes."""
    device_name: str = ""

    def samples(self, path: Path) -> int:
        """The minibatch size; an `InputError` asks for it where it is not given."""
        if self.minibatch is None:
            raise InputError(
                f"{path} does not say how many samples its times are for: give --minibatch, as in --minibatch 64"
            )
        if not 1 <= self.minibatch <= LARGEST_MINIBATCH:
            raise InputError(f"--minibatch must be at least 1 and at most {LARGEST_MINIBATCH}, not {self.minibatch}")
        return self.minibatch

    def per_second(self, path: Path, why: str) -> float:
        """How many of the file's units of time make a second; an `InputError` asks where it is not given."""
        if self.time_unit is None:
            raise InputError(f"{path} does not say its unit of time ({why}): give --time-unit s, ms or us")
        return UNITS[self.time_unit]

    def provenance(self, tool: str, path: Path, notes: list[str]) -> Provenance:
        """Which tool and file the figures come from, and what was assumed."""
        return Provenance(
            kind="imported",
            device_name=self.device_name,
            how=f"imported from {path.name}, {tool}",
            pipeplan=__version__,
            notes=tuple(notes),
        )
