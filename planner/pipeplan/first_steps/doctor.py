"""All checks of `pipeplan doctor`: this machine, torch, a plan's part on this machine, and the executor's self-test.

Checks that need torch run in separate processes, because the planner works without torch.
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pipeplan._version import __version__
from pipeplan.cluster_data.local import local_gpus, local_processors
from pipeplan.util.typed import shortened, whole_number
from pipeplan.util.units import show_size

OK, WARNING, MISSING = "ok", "warning", "missing"
OLDEST = (3, 11)
LEAST_FREE = 64 << 20
"""Bytes that should be free in shared memory, in the temporary folder, and in the current folder, in this order."""
PATIENCE_S, SELFTEST_PATIENCE_S = 60.0, 240.0
"""Seconds to wait for another process, and for the self-test. The self-test begins no further run after 115 s."""


@dataclass(frozen=True)
class DoctorFinding:
    """The result of one check, in plain words."""

    name: str
    needed_for: str
    state: str
    """State of the check: `ok`; `missing` if a main purpose of pipeplan does not work; `warning` if something works
    less well, or a single command does not work."""
    found: str
    todo: str = ""
    """Advice for the user; empty for the state `ok`."""

    def to_json(self) -> dict[str, str]:
        """All fields by name."""
        return asdict(self)


def examine_machine(plan: Path | None = None) -> list[DoctorFinding]:
    """Check this machine, and whether it can run its part of a plan.

    The check takes a few seconds, because another process imports torch.
    """
    with ThreadPoolExecutor() as executor:
        torch = executor.submit(check_torch)
        part = None if plan is None else executor.submit(check_plan_here, plan)
        own = [
            check_folder(Path.cwd()),
            check_temporary_folder(),
            check_shared_memory(),
            check_port(os.environ),
            check_threads(os.environ),
        ]
        first = [check_python(), check_devices()]
        return [*first, *torch.result(), *own, *([] if part is None else [part.result()])]


def check_python() -> DoctorFinding:
    """The versions of the interpreter and of pipeplan."""
    finding = partial(DoctorFinding, "Python", "all of pipeplan")
    found = f"{platform.python_version()} at {sys.executable}, pipeplan {__version__}"
    if sys.version_info < OLDEST:  # possible if the installation ignored pipeplan's metadata
        return finding(MISSING, found, "install Python 3.11 or newer")
    return finding(OK, found)


def check_devices() -> DoctorFinding:
    """The devices of workers, as in `--cluster local`."""
    cards, here = local_gpus(), local_processors()
    if cards:
        kinds = Counter(f"{card.name}, {show_size(card.memory_bytes)}" for card in cards)
        found = "; ".join(f"{count} × {kind}{' each' * (count > 1)}" for kind, count in kinds.items())
    else:
        found = f"no NVIDIA GPU; {here.cores} processor core{'s' * (here.cores != 1)}, {show_size(here.memory_bytes)}"
    return DoctorFinding("devices", "workers", OK, found)


def check_folder(where: Path) -> DoctorFinding:
    """Whether profiles and plans can be written to a folder, and its free space."""
    finding = partial(DoctorFinding, "this folder", "profiles, plans, runs")
    try:
        with tempfile.TemporaryFile(dir=where):
            pass
        free = shutil.disk_usage(where).free
    except OSError as error:
        why = f"cannot write to {where}: {error.strerror or error}"
        return finding(MISSING, why, "change to a folder that you can write to")
    return _room(finding, f"{where} can be written to, {show_size(free)} free", free, "free some space")


def check_temporary_folder() -> DoctorFinding:
    """The folder for temporary files, which torchrun and solvers use."""
    finding = partial(DoctorFinding, "temporary", "solvers, and starting workers")
    try:
        place = tempfile.gettempdir()
        free = shutil.disk_usage(place).free
    except OSError as error:
        return finding(MISSING, error.strerror or str(error), "set TMPDIR to a folder that you can write to")
    todo = "free some space, or set TMPDIR to a larger folder"
    return _room(finding, f"{place}, {show_size(free)} free", free, todo)


def check_shared_memory(place: Path = Path("/dev/shm")) -> DoctorFinding:
    """The shared memory through which prefetching processes pass minibatches on."""
    finding = partial(DoctorFinding, "shared memory", "prefetching data (Data(processes=…))")
    try:
        free = shutil.disk_usage(place).free
    except OSError:
        return finding(WARNING, f"there is no {place}", "mount a tmpfs there")
    todo = "make it larger (in Docker: --shm-size=1g)"
    return _room(finding, f"{place}, {show_size(free)} free", free, todo)


def _room(finding: partial[DoctorFinding], found: str, free: int, todo: str) -> DoctorFinding:
    """The finding on a folder with `free` bytes left."""
    return finding(WARNING, found, todo) if free < LEAST_FREE else finding(OK, found)


def check_port(environment: Mapping[str, str]) -> DoctorFinding:
    """A port for the rendezvous of workers: the port in MASTER_PORT, or any free port."""
    finding = partial(DoctorFinding, "ports", "the rendezvous of workers on several servers")
    value = environment.get("MASTER_PORT", "")
    if value and not 0 < (whole_number(value) or 0) < 1 << 16:
        return finding(MISSING, f"MASTER_PORT is {shortened(value)}, which is no port", "set it to 1024 to 65535")
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as server:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("", int(value or 0)))
            number = server.getsockname()[1]
    except OSError as error:
        what = f"MASTER_PORT {value} cannot be used" if value else "no port is free"
        todo = "set MASTER_PORT to another port, or end the process that uses it"
        return finding(MISSING, f"{what}: {error.strerror}", todo)
    free = f"MASTER_PORT {value} is free" if value else f"port {number} is free, for example for MASTER_PORT"
    return finding(OK, f"{free}; only other servers can tell whether they reach it")


def check_threads(environment: Mapping[str, str]) -> DoctorFinding:
    """Whether OMP_NUM_THREADS overrides the number of threads that the profile was measured with."""
    finding = partial(DoctorFinding, "threads", "workers that are as fast as their profile says")
    value = environment.get("OMP_NUM_THREADS", "")
    if not value:
        return finding(OK, "OMP_NUM_THREADS is not set: launch.sh sets it to the threads of the profile")
    todo = f"unset it, or profile with --threads {value}, so that the prediction holds"
    return finding(WARNING, f"OMP_NUM_THREADS is {value}, and launch.sh keeps it", todo)


def check_torch() -> list[DoctorFinding]:
    """Findings on torch, CUDA, NCCL, Gloo and scikit-learn of this interpreter."""
    answer = _ask()
    torch = partial(DoctorFinding, "torch", "profile and launch.sh (planning needs no torch)")
    sklearn = partial(DoctorFinding, "scikit-learn", "the data of the bundled model mnist")
    digits = sklearn(WARNING, "not installed", "pip install 'pipeplan[examples]'")
    if answer.get("sklearn"):
        digits = sklearn(OK, str(answer["sklearn"]))
    if answer.get("torch") is None:
        todo = answer.get("todo") or "install it anew: pip install 'pipeplan[torch]'"
        return [torch(MISSING, str(answer.get("error")), todo), digits]
    gloo = partial(DoctorFinding, "Gloo", "messages between workers")
    talked = gloo(OK, "two processes made an all-reduce over the loopback interface")
    if why := answer.get("gloo"):
        todo = "let processes talk over the loopback interface: ip link set lo up"
        talked = gloo(MISSING, f"two processes could not talk: {why}", todo)
    return [torch(OK, str(answer["torch"])), *_cuda(answer), talked, digits]


def _cuda(answer: Mapping[str, Any]) -> list[DoctorFinding]:
    seen, built, cards = int(answer.get("cuda_devices") or 0), answer.get("cuda"), len(local_gpus())
    cuda = partial(DoctorFinding, "CUDA", "plans for GPUs")
    if not cards and not seen:
        return [cuda(OK, "no GPU on this machine: workers compute on the processor")]
    if not seen:
        why = f"torch has CUDA {built}, but sees none of them" if built else "this build of torch has no CUDA"
        todo = "install a driver that supports this CUDA version (nvidia-smi shows the newest that yours supports)"
        return [cuda(WARNING, f"{cards} GPUs; {why}", todo if built else "install torch with CUDA")]
    note = f" (nvidia-smi has {cards}: see CUDA_VISIBLE_DEVICES)" if seen < cards else ""
    nccl = partial(DoctorFinding, "NCCL", "all-reduces between GPUs")
    instead = "nothing, or install such a build: Gloo, which is used instead, is slower"
    version = answer.get("nccl")
    return [
        cuda(OK, f"{built}, torch sees {seen} device{'s' * (seen != 1)}{note}"),
        nccl(OK, str(version)) if version else nccl(WARNING, "this build of torch has none", instead),
    ]


def check_plan_here(folder: Path) -> DoctorFinding:
    """Whether this machine can run its part of a plan, by the preflight check of launch.sh."""
    finding = partial(DoctorFinding, "plan", "launch.sh of this plan")
    if not (folder / "stages").is_dir():
        return finding(MISSING, f"{folder} holds no plan that can be run", "name a folder that `pipeplan solve` wrote")
    done = _run(["-m", "pipeplan_launch.preflight", str(folder)], _as_first(os.environ))
    if done is None:
        return finding(MISSING, f"{folder}: the check gave no answer", "run its launch.sh to see the error")
    line = _last_line(done.stderr)
    if done.returncode:
        return finding(MISSING, f"{folder}: {line.removeprefix('error: ')}", "follow this message")
    if line:
        return finding(WARNING, f"{folder}: {line.removeprefix('note: ')}", "nothing, if that is acceptable")
    return finding(OK, f"{folder} can run here")


def _as_first(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment. Missing variables get the values of the first of several servers."""
    with socket.socket() as free:
        free.bind(("", 0))  # finds a port without listening at it
        first = {"NODE_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1])}
    if not environment.get("PIPEPLAN_SECRET_FILE"):
        first["PIPEPLAN_SECRET"] = secrets.token_hex(32)
    return first | {name: value for name, value in environment.items() if value or name not in first}


def run_self_test() -> list[DoctorFinding]:
    """Findings on every small run, on messages, and on the transport of messages for `launch.sh`."""
    report = _answer("pipeplan_measure.selftest", SELFTEST_PATIENCE_S)
    test, more = partial(DoctorFinding, "self-test", "launch.sh"), "run python -m pipeplan_measure.selftest to see more"
    if "results" not in report:
        return [test(MISSING, report["error"], more)]
    found = []
    for one in report["results"]:
        state, text = OK if one["passed"] else MISSING, str(one["text"])
        if str(one["name"]).startswith("messages"):
            need, todo = "messages between stages", more
        else:
            need, todo = "launch.sh", "do not rely on such runs here; report this line"
            text += f" ({one['seconds']:.0f} s)"
        found.append(DoctorFinding(one["name"], need, state, text, "" if state == OK else todo))
    failed = sum(one.state == MISSING for one in found)
    count = f"{failed} of {len(found)} failed" if failed else f"all {len(found)} passed"
    where = f", remembered in {report['remembered']}" if report.get("remembered") else ""
    transport = f"messages travel by --transport {report['transport']}{where}"
    return [*found, test(OK, f"{count} on {report['hardware']}; {transport}")]


def _ask() -> dict[str, Any]:
    """The executor's answer on torch, or an entry `error`."""
    answer = _answer("pipeplan_launch.capabilities", PATIENCE_S)
    return {"error": f"importing it failed: {answer['error']}"} if answer.get("ended") else answer


def _answer(module: str, patience_s: float) -> dict[str, Any]:
    """The JSON document on the last line that a module prints.

    If there is no such line, the result has an entry `error`, and `ended` if the module ended."""
    done = _run(["-m", module], patience_s=patience_s)
    if done is None:
        return {"error": f"no answer within {patience_s:g} s"}
    try:
        answer: dict[str, Any] = json.loads(_last_line(done.stdout))
    except ValueError:
        return {"error": _last_line(done.stderr) or f"ended with status {done.returncode}", "ended": True}
    return answer


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def _run(
    arguments: list[str], environment: Mapping[str, str] | None = None, patience_s: float = PATIENCE_S
) -> subprocess.CompletedProcess[str] | None:
    command = [sys.executable, *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=patience_s, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired):
        return None
