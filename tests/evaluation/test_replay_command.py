"""The command for replays, where nothing needs to be run: mistakes, and what is printed."""

from __future__ import annotations

from pathlib import Path

import fault_replay
import pytest
import replay
import replay_run
from replay_builders import PROFILE, REPLAYED, two_servers, write
from replay_measure import ReplayedStage
from replay_network import LinkUse
from rich.console import Console

from pipeplan.errors import InputError


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan, in which nothing may be started."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.chdir(tmp_path)
    for module in (replay_run, fault_replay):
        monkeypatch.setattr(module, "check_requirements", lambda processes=False: None)
    monkeypatch.setattr(replay_run.subprocess, "Popen", started)
    PROFILE.save(Path("profile.json"))
    return write(tmp_path / "plan", two_servers(), stages=2)


MISTAKES = {
    "nowhere": "nowhere has no plan.json; `pipeplan solve` writes plan folders",
    "--timeout 3": "--timeout is for a replay with a --fault",
    "--fault explode": "there is no fault 'explode'",
    "--fault kill:worker7": "its stages are on workers 0, 1",
    "--fault kill@5000": "the fault would come after the end",
    "--fault kill@3600s": "is too long: give at most",
    "--fault cut --timeout 1": "workers may wait for each other",
    "--keep plan": "plan has something in it",
    "--profile missing.json": "missing.json",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line(planned: Path, tmp_path: Path, words: str) -> None:
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError) as raised:
        replay.main(words.split())
    assert MISTAKES[words] in str(raised.value)
    assert "\n" not in str(raised.value)
    assert sorted(tmp_path.rglob("*")) == before, "nothing is made"


def test_an_inference_has_no_faults(planned: Path, tmp_path: Path) -> None:
    write(tmp_path / "inference", two_servers(), inference=True)
    with pytest.raises(InputError, match="faults are replayed for training only"):
        replay.main(["inference", "--fault", "kill"])


def test_what_is_printed_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    stages = (ReplayedStage(12, 0.9999, 0.3, 0.6, 1e-4, 0.0333, 0.0777, 2e-8),) * 3
    links = (LinkUse("server 12", 1.25e9, "out", 987654321.0, 0.99, 987654321.0, 1.0),)
    found = REPLAYED.__class__(**vars(REPLAYED) | {"stages": stages, "links": links, "unshaped": ("server",)})
    replay.show_replay(found, Console(width=80, highlight=False, markup=False))
    out = capsys.readouterr().out
    tables = [line for line in out.splitlines() if line.startswith((" ", "server 12", "1", "2", "3"))]
    assert max(map(len, tables)) <= 80
    assert "…" not in out
    assert "Links inside a server are not shaped" in out
    assert "942 MiB" in out
