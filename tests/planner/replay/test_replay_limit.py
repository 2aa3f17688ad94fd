"""A replay that takes too long is ended, and that is what is said of it."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from emulated import PROFILE, two_servers, write

from pipeplan.errors import InputError
from pipeplan.replay import requirements, run
from pipeplan_launch.emulation import __main__ as emulation

ENDLESS, FAILING, WELL = "import time; time.sleep(100)", "raise SystemExit(3)", ""


@pytest.fixture
def started() -> Iterator[list[int]]:
    """Process ids, to be ended whatever happens."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(sys.platform != "linux", reason="replays need Linux")
@pytest.mark.parametrize(
    ("programs", "limit_s", "statuses", "late"),
    [
        ([WELL, WELL], 60.0, [0, 0], False),
        ([ENDLESS, ENDLESS], 0.0, [-9, -9], True),
        ([FAILING, WELL], 60.0, [3, 0], False),
    ],
    ids=["well", "late", "failed"],
)
def test_who_is_ended_because_time_is_up(
    started: list[int], programs: list[str], limit_s: float, statuses: list[int], late: bool
) -> None:
    started += [
        os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", program], os.environ) for program in programs
    ]
    workers = {pid: rank for rank, pid in enumerate(started)}
    found, is_late = emulation._finish(workers, time.monotonic() + limit_s)
    started.clear()
    assert [found[rank] for rank in range(len(programs))] == statuses
    assert is_late is late


def test_what_is_said_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []

    def too_slow(order: dict[str, Any], *rest: object) -> dict[str, Any]:
        limits.append(order["limit_s"])
        return {"statuses": [-9, -9], "late": True}

    monkeypatch.setattr(requirements, "check_requirements", lambda: None)
    monkeypatch.setattr(run, "run_order", too_slow)
    with pytest.raises(InputError) as raised:
        run.replay_plan(write(tmp_path / "plan", two_servers(), stages=2), PROFILE, run.ReplaySettings(seconds=7.0))
    text = str(raised.value)
    assert text.startswith(f"the replay took longer than {limits[0]:.0f} s, for 7 s of training: ")
    assert "less to do" in text
    assert "--seconds" in text
    assert "\n" not in text
