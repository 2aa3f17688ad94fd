"""The result of one check."""

from __future__ import annotations

from dataclasses import asdict, dataclass

OK, WARNING, MISSING = "ok", "warning", "missing"


@dataclass(frozen=True)
class DoctorFinding:
    """The result of one check, in plain words."""

    name: str
    state: str
    """`ok`; `missing` if a main purpose of pipeplan does not work; `warning` if something works less well, or a single
    command does not work."""
    found: str
    needed_for: str
    todo: str = ""
    """Advice for the user; empty for the state `ok`."""

    def to_json(self) -> dict[str, str]:
        """All fields by name."""
        return asdict(self)
