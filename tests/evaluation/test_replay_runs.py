"""Real replays on emulated servers: their pace, faults, and that nothing of them stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import network_namespaces as requirements
import pytest
import replay
from replay_builders import PROFILE, two_servers, write

LACKS = requirements.missing_requirement(processes=True)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(LACKS), reason=LACKS)]
REPLAY = [sys.executable, replay.__file__, "plan"]
PATIENCE_S = 120.0


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    """A folder with a straight plan of two stages on two servers, and its profile."""
    PROFILE.save(tmp_path / "profile.json")
    write(tmp_path / "plan", two_servers(), stages=2)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def start(folder: Path, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*REPLAY, *options],
        cwd=folder,
        env=os.environ | {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(Path(requirements.__file__).parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def replayed(folder: Path, *options: str) -> dict[str, Any]:
    process = start(folder, "--json", *options)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert err == "", "nobody looks at a terminal"
    found: dict[str, Any] = json.loads(out)
    assert process.returncode == (0 if found.get("kept", True) else 1)
    assert nothing_left(folder)
    return found


def nothing_left(folder: Path) -> bool:
    """No process that names the folder, and no file in its folder for temporary ones."""
    return not processes(folder) and not list((folder / "tmp").iterdir())


def processes(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(folder / "tmp").encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def test_a_replay_is_near_the_prediction(planned: Path) -> None:
    found = replayed(planned, "--seconds", "5")
    # Loosely, as nobody knows what else this machine does: a replay whose messages or sleeps were wrong is off by more.
    assert found["measured_s"] == pytest.approx(0.060, rel=0.25)
    assert found["predicted_s"] == pytest.approx(0.060)
    # (name, way) -> bytes: activations of 2 MB, or gradients of 1 MB, and what TCP and the executor add.
    sizes = {(link["name"], link["direction"]): link["bytes_per_minibatch"] for link in found["links"]}
    assert sizes.keys() == {("server 0", "out"), ("server 1", "in")}
    assert all(2.0e6 < size < 2.1e6 for size in sizes.values())
    assert [stage["forward_s"] + stage["backward_s"] for stage in found["stages"]] == pytest.approx(
        [0.060, 0.030], rel=0.25
    )
    assert found["cause"]


@pytest.mark.parametrize(
    ("fault", "restarts"),
    [("kill:worker1@20", 1), ("freeze:worker0@20", 1), ("flap:server1:2s@20", 0)],
)
def test_a_fault_that_is_overcome(planned: Path, fault: str, restarts: int) -> None:
    found = replayed(planned, "--fault", fault, "--timeout", "12", "--seconds", "8")
    assert found["broken"] == []
    assert found["restarts"] == restarts
    assert found["done"] == found["minibatches"]
    assert found["statuses"] == [0, 0]
    assert found["back_s"] > 0
    assert (found["noticed_s"] is None) == (restarts == 0)
    assert bool(found["said"]) == bool(restarts)


@pytest.mark.parametrize("server", [0, 1])
def test_a_link_that_is_cut_for_good(planned: Path, server: int) -> None:
    found = replayed(planned, "--fault", f"cut:server{server}@20", "--timeout", "8", "--seconds", "8")
    assert found["broken"] == []
    assert found["statuses"] == [2, 2]
    assert 0 < found["noticed_s"] < found["all_ended_s"] < found["over_s"]
    assert all(line.startswith("error: ") for line in found["said"])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("fault", [[], ["--fault", "kill@300"]], ids=["forked", "launched"])
def test_whatever_ends_it_nothing_stays(planned: Path, number: signal.Signals, fault: list[str]) -> None:
    before = mounts_and_links()
    process = start(planned, "--seconds", "100", *fault)
    (room,) = until(lambda: [one for one in (planned / "tmp").iterdir() if (one / "order.json").exists()])
    until(lambda: list(room.glob("run/metrics/*.jsonl")))
    assert processes(planned)
    process.send_signal(number)
    _, err = process.communicate(timeout=30)
    assert process.returncode in (130, 143, -signal.SIGKILL)
    assert err in ("", "\nerror: interrupted\n", "error: interrupted\n")
    until(lambda: not processes(planned), 10)
    # A process that is killed cannot remove its folder.
    assert room.exists() == (number is signal.SIGKILL)
    assert mounts_and_links() == before


def mounts_and_links() -> tuple[list[str], list[str]]:
    """Of the machine, as far as other emulations could have to do with them."""
    mounts = [line for line in Path("/proc/mounts").read_text().splitlines() if "/run" in line]
    return mounts, sorted(path.name for path in Path("/sys/class/net").iterdir())


def until(condition: Any, patience_s: float = PATIENCE_S) -> Any:
    deadline = time.monotonic() + patience_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return found
