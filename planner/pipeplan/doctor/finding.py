"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass

OK, WARNING, MISSING = "ok", "warning", "missing"


@dataclass(frozen=True)
class Finding:
    """What was found, in plain words."""

    name: str
    state: str
    """`ok`; `missing`: something that pipeplan is for does not work; `warning`: something goes less well, or one
    command alone does not work."""
    found: str
    needed_for: str
    todo: str = ""
    """What to do; empty where nothing is."""

    def to_json(self) -> dict[str, str]:
        """All fields."""
        return asdict(self)
