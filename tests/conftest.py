"""What several test files need: the reference data, where it is there."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

# Whatever a shell starts in the background does not hear Ctrl-C, nor does what it starts: tests send it themselves.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_BESIDE = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of published figures, named by PIPEPLAN_REFERENCE; tests that compare with them skip without it."""
    folder = Path(os.environ.get("PIPEPLAN_REFERENCE", _BESIDE))
    if not (folder / "pipedream" / "vgg16.txt").is_file():
        pytest.skip(
            f"no published profiles in {folder / 'pipedream'}: set PIPEPLAN_REFERENCE to a folder that has them"
        )
    return folder
