"""`pipeplan replay` as a person meets it, where nothing needs to be run: mistakes, and what is printed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from emulated import PROFILE, two_servers, write
from replayed import REPLAYED
from rich.console import Console

from pipeplan.cli import main
from pipeplan.replay import process, requirements, terminal
from pipeplan.replay.outcome import LinkUse, ReplayedStage
from pipeplan.replay.run import minibatches_done


@pytest.fixture
def planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a plan, in which nothing may be started."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(requirements, "check_requirements", lambda processes=False: None)
    monkeypatch.setattr(process.subprocess, "Popen", started)
    monkeypatch.setattr(requirements, "_try", started)
    PROFILE.save(Path("profile.json"))
    return write(tmp_path / "plan", two_servers(), stages=2)


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> str:
    before = sorted(folder.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["pipeplan", "replay", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert sorted(folder.rglob("*")) == before, "nothing is made"
    return err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["nowhere"], "nowhere does not exist; `pipeplan solve` writes plan folders"),
        (["."], "has no plan.json"),
        (["--timeout", "3"], "--timeout is for a replay with a --fault"),
        (["--fault", "explode"], "there is no fault 'explode'"),
        (["--fault", "kill:worker7"], "its stages are on workers 0, 1"),
        (["--fault", "kill@5000"], "the fault would come after the end"),
        (["--fault", "kill@3600s"], "is too long: give at most"),
        (["--fault", "cut", "--timeout", "1"], "workers may wait for each other"),
        (["--keep", "plan"], "plan has something in it"),
        (["--seconds", "0"], "--seconds"),
        (["--profile", "missing.json"], "missing.json"),
    ],
    ids=lambda one: "-".join(one).strip("-") if isinstance(one, list) else None,
)
def test_a_mistake_is_one_line(
    planned: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    why: str,
) -> None:
    assert why in refused(monkeypatch, capsys, tmp_path, *arguments)


@pytest.mark.parametrize("name", ["plan.json", "stages/stage-1.json"])
@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_a_damaged_plan_is_one_line(
    planned: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    damage: str,
) -> None:
    path = planned / name
    if damage == "gone":
        path.unlink()
    else:
        path.write_text(path.read_text()[:100])
    assert Path(name).name in refused(monkeypatch, capsys, tmp_path)


def test_an_inference_has_no_faults(
    planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        sys, "argv", ["pipeplan", "solve", "--cluster", "A", "--inference", "-o", "inference", "--solver", "dp"]
    )
    with pytest.raises(SystemExit):
        main()
    capsys.readouterr()
    assert "faults are replayed for training only" in refused(
        monkeypatch, capsys, tmp_path, "inference", "--fault", "kill"
    )


def test_what_is_printed_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    stages = (ReplayedStage(12, 0.9999, 0.3, 0.6, 1e-4, 0.0333, 0.0777, 2e-8),) * 3
    links = (LinkUse("server 12", 1.25e9, "out", 987654321.0, 0.99, 987654321.0, 1.0),)
    found = REPLAYED.__class__(**vars(REPLAYED) | {"stages": stages, "links": links, "unshaped": ("server",)})
    terminal.show_replay(found, Console(width=80, highlight=False, markup=False))
    out = capsys.readouterr().out
    tables = [line for line in out.splitlines() if line.startswith((" ", "server 12", "1", "2", "3"))]
    assert max(map(len, tables)) <= 80
    assert "…" not in out
    assert "Links inside a server are not shaped" in out
    assert "942 MiB" in out


def test_how_far_a_replay_is(tmp_path: Path) -> None:
    assert minibatches_done(tmp_path) is None
    (tmp_path / "metrics").mkdir()
    for rank, numbers in enumerate(([0, 2, 4], [1, 3], [])):
        lines = [json.dumps({"minibatch": number, "more": "x" * 3000}) + "\n" for number in numbers]
        (tmp_path / "metrics" / f"rank-{rank}.jsonl").write_text("".join(lines) + '{"minib')
    assert minibatches_done(tmp_path) == 5
