"""A server of two is killed while they train: replanned for the other one, training goes on from the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import replan


def _only_the_first(found: list[Path]) -> None:
    """All later checkpoints went with the server: what came after the first one is known from the metrics."""
    for manifest in found[1:]:
        manifest.unlink()


@pytest.mark.slow
def test_training_goes_on_where_the_checkpoint_was(tmp_path: Path) -> None:
    measured = replan.measure(tmp_path, "mnist", checkpoints=2, lost_too=_only_the_first)
    before = _losses(tmp_path / replan.BEFORE)
    (run,) = (tmp_path / "plan-replanned/runs").iterdir()
    after = _losses(run)
    assert min(after) == measured.due <= measured.killed_at
    # The first minibatch after a checkpoint meets its weights, under any plan.
    assert after[measured.due] == pytest.approx(before[measured.due], rel=1e-4)
    ranks = {int(path.stem.removeprefix("rank-")) for path in run.glob("metrics/rank-*.jsonl")}
    assert ranks <= {0, 1}
    assert not _still_running(tmp_path)


def _losses(run: Path) -> dict[tuple[int, int], float]:
    return {replan.position(line): line["loss"] for line in replan.lines(run)}


def _still_running(folder: Path) -> list[str]:
    """Commands of processes that name something in a folder."""
    commands = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if Path(path / "cwd").resolve() == folder:
                commands.append((path / "cmdline").read_text())
        except OSError:  # it has ended since
            continue
    return commands
