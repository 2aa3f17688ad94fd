"""Arguments of the modules that rendered scripts call: facts of the plan, `--`, and the user's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pipeplan_launch.errors import LaunchError


def parse_script_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the facts with `parser`, after adding those that all scripts have. The user's arguments stay unparsed."""
    parser.add_argument("--plan", required=True, help="the plan folder")
    parser.add_argument("--digest", required=True, help="digest of the plan: another plan is refused")
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    return parser.parse_args(arguments[:end]), list(arguments[end + 1 :])


def check_digest(plan_folder: str, digest: str, kind: str) -> None:
    """Raise `LaunchError` unless `plan_folder` still holds the plan that the script was rendered for.

    `digest`: the digest of that plan, which stage files name. `kind`: `ssh` or `slurm`.
    """
    stage = Path(plan_folder, "stages", "stage-0.json")
    try:
        same = digest in stage.read_text(encoding="utf-8", errors="replace")
    except OSError:
        same = False
    if not same:
        raise LaunchError(
            f"the plan in {plan_folder} is not the one that this file was rendered for: run pipeplan export {kind} "
            "--force"
        )
