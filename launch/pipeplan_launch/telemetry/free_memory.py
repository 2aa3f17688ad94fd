"""Memory that this process may still allocate, by the machine and its control groups. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path


def free_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still allocate, by the machine and its control groups; None if neither is known."""
    limits = [_meminfo(root), *_control_groups(root)]
    return min((limit for limit in limits if limit is not None), default=None)


def _meminfo(root: Path) -> int | None:
    for line in read_text(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _control_groups(root: Path) -> Iterator[int | None]:
    """Free bytes of the control groups (version 1 and 2), from this process's own to the outermost that it sees."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            top, limit_file, usage_file = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            limit_file, usage_file = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        folder = top / path.strip("/")
        while True:
            yield _group_free_bytes(folder, limit_file, usage_file)
            if folder == top:
                break
            folder = folder.parent


def _group_free_bytes(folder: Path, limit_file: str, usage_file: str) -> int | None:
    limit, used = read_text(folder / limit_file).strip(), read_text(folder / usage_file).strip()
    if not limit.isdecimal() or not used.isdecimal():
        return None  # "max", or no such file
    # The page cache counts as used, but the kernel drops it when memory is needed.
    cached = re.search(r"^(?:total_)?inactive_file (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
    return max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))


def read_text(path: Path) -> str:
    """The text of a file of /proc or /sys; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
