"""The executor's self-test as findings: small plans that are trained on this machine. It runs in another process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from pipeplan.first_steps.finding import MISSING, OK, DoctorFinding

PATIENCE_S = 240.0
"""Seconds after which the self-test is given up. It begins no further run after 115."""
RUNS, MESSAGES = "launch.sh", "messages between stages"


def run_self_test() -> list[DoctorFinding]:
    """Findings on every small run, on messages, and on the way of messages that `launch.sh` is to use."""
    command = [sys.executable, "-m", "pipeplan_launch.selftest"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
        report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return [_no_answer(f"no answer within {PATIENCE_S:g} s")]
    except (OSError, ValueError, IndexError):
        return [_no_answer((done.stderr.strip().splitlines() or ["it gave no answer"])[-1])]
    results = [_result(one) for one in report["results"]]
    return [*results, _verdict(report, failed=sum(one.state == MISSING for one in results))]


def _no_answer(why: str) -> DoctorFinding:
    return DoctorFinding("self-test", MISSING, why, RUNS, "run python -m pipeplan_launch.selftest to see more")


def _result(one: Mapping[str, Any]) -> DoctorFinding:
    name, text = str(one["name"]), str(one["text"])
    if name.startswith("messages"):
        todo = "" if one["passed"] else "run python -m pipeplan_launch.selftest to see more"
        return DoctorFinding(name, OK if one["passed"] else MISSING, text, MESSAGES, todo)
    found = f"{text} ({one['seconds']:.0f} s)"
    if one["passed"]:
        return DoctorFinding(name, OK, found, RUNS)
    return DoctorFinding(name, MISSING, found, RUNS, "do not rely on such runs here; report this line")


def _verdict(report: Mapping[str, Any], failed: int) -> DoctorFinding:
    way = f"messages travel by --transport {report['transport']}"
    where = f", remembered in {report['remembered']}" if report.get("remembered") else ""
    count = f"{failed} of {len(report['results'])} failed" if failed else f"all {len(report['results'])} passed"
    return DoctorFinding("self-test", OK, f"{count} on {report['hardware']}; {way}{where}", RUNS)
