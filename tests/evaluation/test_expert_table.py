"""One small row of the expert table, from a profile to the printed line."""

from __future__ import annotations

from pathlib import Path

import expert_table
import pytest

import pipeplan

SMALL = expert_table.Question("small", "mixed", 256)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the profiles of a small model, whose V100 has the speed of the A100."""
    monkeypatch.setitem(expert_table.MODELS, "small", ("small model", (64, 256)))
    for device in ("a100", expert_table.SLOWER):
        pipeplan.read_profile("mnist-v100").save(tmp_path / f"small-{device}.json")
    return tmp_path


def test_a_row_has_the_answer_and_its_rivals(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = expert_table.solved(SMALL, folder, 60, cpu=False)
    assert not row.problem
    assert row.rate >= max(row.rivals.values()) / 1.03
    assert {"DDP", "ZeRO-1"} <= row.rivals.keys()
    assert 256 % row.microbatch == 0
    assert 0 <= row.idle < 24
    assert list(expert_table.saved_rows([SMALL], folder)) == [row]
    expert_table.print_rows([row], markdown=True)
    assert f"| small model | 256 | {expert_table.answer_of(row)} | {row.microbatch} |" in capsys.readouterr().out
