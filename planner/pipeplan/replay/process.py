"""Runs an emulation in namespaces of its own and removes them afterwards, also after errors and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from pipeplan.errors import InputError
from pipeplan_launch.emulation.network_namespaces import OWN_NAMESPACES

LOOK_S = 0.5


@contextmanager
def working_folder(keep: Path | None) -> Iterator[Path]:
    """A working folder that is removed afterwards, or the folder `keep`, which stays.

    Raises `InputError` where `keep` is not empty or cannot be created.
    """
    if keep is None:
        with tempfile.TemporaryDirectory(prefix="pipeplan-replay-", ignore_cleanup_errors=True) as folder:
            yield Path(folder)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise InputError(f"{keep} has something in it: --keep needs a new folder, or an empty one")
    except OSError as error:
        raise InputError(
            f"{keep} cannot be used: {error.strerror or error}; choose another folder for --keep"
        ) from error
    yield keep.absolute()


def run_order(order: dict[str, Any], folder: Path, watch: Callable[[], None]) -> dict[str, Any]:
    """Run an order and return its result, after all of its processes have ended. `watch` is called every half second.

    Raises `InputError` with the first error that was printed inside.
    """
    path, log, out = folder / "order.json", folder / "log.txt", folder / "result.json"
    path.write_text(json.dumps(order | {"out": str(out)}))
    command = [*OWN_NAMESPACES, sys.executable, "-m", "pipeplan_launch.emulation", str(path)]
    # torch creates a temporary folder and does not remove it.
    environment = os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR", "TMPDIR": str(folder)}
    with log.open("w") as file, _terminated_like_interrupted():
        # The emulation ends when this end of the pipe closes, which also happens if this process is killed.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=environment, start_new_session=True
        )
        try:
            status = _wait(process, watch)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            assert process.stdin is not None
            process.stdin.close()
    if status or not out.is_file():
        raise InputError(f"the replay failed: {last_line(log)}")
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def last_line(log: Path) -> str:
    """The first error in a log, or its last line."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return (errors or lines or ["no message"])[-1]


def _wait(process: subprocess.Popen[bytes], watch: Callable[[], None]) -> int:
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(LOOK_S)
        watch()


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Raise `SystemExit` on SIGTERM and SIGHUP, which would otherwise end this process without removing its folder."""

    def end(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, usual in before.items():
        if usual == signal.SIG_DFL:
            signal.signal(number, end)
    try:
        yield
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
