"""The progress of a running replay."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

END_BYTES = 4096


def minibatches_done(run: Path) -> int | None:
    """The number of minibatches done by the most advanced worker, from its metrics; None before the first one."""
    numbers = [number for path in run.glob("metrics/*.jsonl") if (number := _last(path)) is not None]
    return max(numbers) + 1 if numbers else None


def _last(path: Path) -> int | None:
    with suppress(OSError, ValueError, KeyError, TypeError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - END_BYTES))
        *lines, _ = file.read().split(b"\n")
        if lines:
            return int(json.loads(lines[-1])["minibatch"])
    return None
