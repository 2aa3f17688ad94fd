"""Removes compiled code that no version of the loops has used for a month.

Every version of the sources has a folder of its own (`availability.code_folder`). A process that uses one sets its time
once a day, and then looks for others to remove. Nothing depends on this: a process whose folder is removed while it
reads it compiles anew, as on the first day. A folder is renamed before it is emptied, so that nobody finds half of it,
and is given back its name if somebody used it at that moment.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

DAY_S = 24 * 3600.0
UNUSED_S = 30 * DAY_S
"""Seconds without use after which code is removed."""

_VERSION = re.compile(r"(removed-)?[0-9a-f]{16}(-[0-9]+)?")
"""Names of the folders of versions, and of those that are being removed."""


def note_use(folder: Path, now_s: float | None = None) -> None:
    """Note that the code in a folder is used, and once a day remove that of other versions that is not.

    `now_s` is in seconds of the system's clock. What cannot be written is left as it is.
    """
    now_s = time.time() if now_s is None else now_s
    with suppress(OSError):
        if folder.is_dir() and now_s - folder.stat().st_mtime < DAY_S:
            return
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder, (now_s, now_s))
        for other in folder.parent.iterdir():
            if other != folder and _VERSION.fullmatch(other.name) and _is_unused(other, now_s):
                _remove(other, now_s)


def _is_unused(folder: Path, now_s: float) -> bool:
    """Whether nobody used a folder for so long, by its own time and by when its files were last read or written."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    used_s = folder.stat().st_mtime
    for file in folder.rglob("*"):
        if file.is_file():
            used_s = max(used_s, file.stat().st_atime, file.stat().st_mtime)
    return now_s - used_s > UNUSED_S


def _remove(folder: Path, now_s: float) -> None:
    """Remove a folder, unless it is used in the meantime."""
    version = folder.name.removeprefix("removed-").split("-")[0]
    aside = folder.with_name(f"removed-{version}-{os.getpid()}")
    with suppress(OSError):
        folder.rename(aside)
        if _is_unused(aside, now_s):
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.rename(folder)
