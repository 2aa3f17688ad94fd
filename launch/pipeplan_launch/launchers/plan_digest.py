"""Does the plan folder still hold the plan that a launch script was rendered for?"""

from __future__ import annotations

from pathlib import Path

from pipeplan_launch.errors import LaunchError


def check_digest(plan_folder: str, digest: str, kind: str) -> None:
    """Raise `LaunchError` unless the first stage file of `plan_folder` names `digest`; `kind` is ssh or slurm."""
    stage = Path(plan_folder, "stages", "stage-0.json")
    try:
        same = digest in stage.read_text(encoding="utf-8", errors="replace")
    except OSError:
        same = False
    if not same:
        raise LaunchError(
            f"the plan in {plan_folder} is not the one that this file was rendered for: run pipeplan render {kind} "
            "--force"
        )
