"""The command line of a module that a rendered script calls: facts of the plan, `--`, and the user's arguments."""

from __future__ import annotations

import argparse
from collections.abc import Sequence


def parse_script_arguments(
    parser: argparse.ArgumentParser, arguments: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Parse the facts with `parser`, after adding those that all scripts have. The user's arguments stay unparsed."""
    parser.add_argument("--plan", required=True, help="the plan folder")
    parser.add_argument("--digest", required=True, help="digest of the plan: another plan is refused")
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    return parser.parse_args(arguments[:end]), list(arguments[end + 1 :])
