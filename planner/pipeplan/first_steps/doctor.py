"""All checks of `pipeplan doctor`: those that need torch, and the executor's self-test, which trains small plans here.

They run in processes of their own, because the planner works without torch.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeplan.cluster_data.local import local_gpus
from pipeplan.first_steps import doctor_machine
from pipeplan.first_steps.doctor_machine import MISSING, OK, WARNING, DoctorFinding

PATIENCE_S = 60.0
"""Seconds to wait for the other process."""
SELFTEST_PATIENCE_S = 240.0
"""Seconds after which the self-test is given up. It begins no further run after 115."""
RUNS, MESSAGES = "launch.sh", "messages between stages"
TRAINING = "profile and launch.sh (planning needs no torch)"


def check_torch() -> list[DoctorFinding]:
    """Findings on torch, CUDA, NCCL, Gloo and scikit-learn of this interpreter."""
    answer = _ask()
    if answer.get("torch") is None:
        found, todo = str(answer.get("error")), answer.get("todo") or "install it anew: pip install 'pipeplan[torch]'"
        return [DoctorFinding("torch", MISSING, found, TRAINING, todo), _scikit_learn(answer)]
    return [
        DoctorFinding("torch", OK, str(answer["torch"]), TRAINING),
        *_cuda(answer),
        _gloo(answer),
        _scikit_learn(answer),
    ]


def check_plan_here(folder: Path) -> DoctorFinding:
    """Whether this machine can run its part of a plan, by the preflight check of launch.sh."""
    need = "launch.sh of this plan"
    if not (folder / "stages").is_dir():
        todo = "name a folder that `pipeplan solve` wrote"
        return DoctorFinding("plan", MISSING, f"{folder} holds no plan that can be run", need, todo)
    done = _run(["-m", "pipeplan_launch.preflight", str(folder)], _as_first(os.environ))
    if done is None:
        return DoctorFinding(
            "plan", MISSING, f"{folder}: the check gave no answer", need, "run its launch.sh to see the error"
        )
    line = (done.stderr.strip().splitlines() or [""])[-1]
    if done.returncode:
        return DoctorFinding("plan", MISSING, f"{folder}: {line.removeprefix('error: ')}", need, "follow this message")
    if line:
        return DoctorFinding(
            "plan", WARNING, f"{folder}: {line.removeprefix('note: ')}", need, "nothing, if that is acceptable"
        )
    return DoctorFinding("plan", OK, f"{folder} can run here", need)


def _cuda(answer: Mapping[str, Any]) -> list[DoctorFinding]:
    seen, built, cards = int(answer.get("cuda_devices") or 0), answer.get("cuda"), len(local_gpus())
    need = "plans for GPUs"
    if not cards and not seen:
        return [DoctorFinding("CUDA", OK, "no GPU on this machine: workers compute on the processor", need)]
    if not seen:
        why = f"torch has CUDA {built}, but sees none of them" if built else "this build of torch has no CUDA"
        todo = "install a driver that supports this CUDA version (nvidia-smi shows the newest that yours supports)"
        return [
            DoctorFinding("CUDA", WARNING, f"{cards} GPUs; {why}", need, todo if built else "install torch with CUDA")
        ]
    few = seen < cards
    note = f" (nvidia-smi has {cards}: see CUDA_VISIBLE_DEVICES)" if few else ""
    nccl, all_reduce = answer.get("nccl"), "all-reduces between GPUs"
    return [
        DoctorFinding("CUDA", OK, f"{built}, torch sees {seen} device{'s' * (seen != 1)}{note}", need),
        DoctorFinding("NCCL", OK, str(nccl), all_reduce)
        if nccl
        else DoctorFinding(
            "NCCL",
            WARNING,
            "this build of torch has none",
            all_reduce,
            "nothing, or install such a build: Gloo, which is used instead, is slower",
        ),
    ]


def _gloo(answer: Mapping[str, Any]) -> DoctorFinding:
    need = "messages between workers"
    if why := answer.get("gloo"):
        todo = "let processes talk over the loopback interface: ip link set lo up"
        return DoctorFinding("Gloo", MISSING, f"two processes could not talk: {why}", need, todo)
    return DoctorFinding("Gloo", OK, "two processes made an all-reduce over the loopback interface", need)


def _scikit_learn(answer: Mapping[str, Any]) -> DoctorFinding:
    need = "the data of the bundled model mnist"
    if answer.get("sklearn"):
        return DoctorFinding("scikit-learn", OK, str(answer["sklearn"]), need)
    return DoctorFinding("scikit-learn", WARNING, "not installed", need, "pip install 'pipeplan[examples]'")


def _ask() -> dict[str, Any]:
    """The answer of the executor's self-test, or an entry `error`."""
    done = _run(["-m", "pipeplan_launch.capabilities"])
    if done is None:
        return {"error": f"no answer within {PATIENCE_S:g} s"}
    try:
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"])[-1]
        return {"error": f"importing it failed: {last}"}
    return answer


def _as_first(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the variables of the first of several servers, as far as they are not set."""
    with socket.socket() as free:
        free.bind(("", 0))  # finds a port without listening at it
        first = {"NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    if not environment.get("PIPEPLAN_SECRET_FILE"):
        first["PIPEPLAN_SECRET"] = secrets.token_hex(32)
    return first | {name: value for name, value in environment.items() if value or name not in first}


def _run(
    arguments: list[str], environment: Mapping[str, str] | None = None, patience_s: float = PATIENCE_S
) -> subprocess.CompletedProcess[str] | None:
    command = [sys.executable, *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=patience_s, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None


def run_self_test() -> list[DoctorFinding]:
    """Findings on every small run, on messages, and on the way of messages that `launch.sh` is to use."""
    done = _run(["-m", "pipeplan_launch.selftest"], patience_s=SELFTEST_PATIENCE_S)
    if done is None:
        return [_no_answer(f"no answer within {SELFTEST_PATIENCE_S:g} s")]
    try:
        report: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
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


def examine_machine(plan: Path | None = None) -> list[DoctorFinding]:
    """Check this machine, and whether it can run its part of a plan.

    Takes some seconds, because another process imports torch.
    """
    with ThreadPoolExecutor() as executor:
        torch = executor.submit(check_torch)
        part = None if plan is None else executor.submit(check_plan_here, plan)
        own = [
            doctor_machine.check_python(),
            doctor_machine.check_devices(),
            doctor_machine.check_folder(Path.cwd()),
            doctor_machine.check_temporary_folder(),
            doctor_machine.check_shared_memory(),
            doctor_machine.check_port(os.environ),
            doctor_machine.check_threads(os.environ),
        ]
        return [*own[:2], *torch.result(), *own[2:], *([] if part is None else [part.result()])]
