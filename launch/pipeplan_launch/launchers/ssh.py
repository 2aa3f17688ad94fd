"""`python -m pipeplan_launch.launchers.ssh …`: starts a plan on hosts that are reached by ssh. launch-ssh.sh calls it.

1. Read the options (`ssh_connection`) and the hosts (`hosts_file`).
2. With `--copy`, bring the plan to all hosts (`ssh_requests`).
3. Check whether all hosts can take part (`ssh_requests`). If one cannot, training does not start.
4. Run launch.sh on all hosts and pass on requests to stop (`Training`, and on each host `host_supervisor`).
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

from pipeplan_launch.elastic import handshake
from pipeplan_launch.errors import LaunchError, print_status, terminal_line
from pipeplan_launch.job_reference import file_of
from pipeplan_launch.launchers.hosts_file import Host, check_digest, parse_script_arguments, read_hosts
from pipeplan_launch.launchers.ssh_connection import (
    CONNECTION_LOST,
    TRAIN,
    USAGE,
    Launch,
    SshOptions,
    host_program,
    start_ssh,
)
from pipeplan_launch.launchers.ssh_requests import Abandoned, HostRequests, check_hosts, copy_to_all
from pipeplan_launch.plan.stage_files import load_plan

# Run launch.sh on all hosts, as if they were one machine, until it has ended on all of them.
#
# Each host reads requests from the standard input of its ssh: `stop` ends training at a checkpoint, `kill` ends it at
# once, and `here` only says that this script is alive. A host stops at a checkpoint by itself if its input ends, or
# brings nothing for a minute (`host_supervisor`).

ALIVE_S = 5.0
"""Time between two `here` requests."""
STOP_OTHERS_S, KILL_OTHERS_S = 10.0, 30.0
"""Times after the first failure at which the other hosts are stopped, and killed. Before that most hosts fail by
themselves, and report why."""
LAST_OUTPUT_S = 5.0
STOPPED, TERMINATED = 130, 128 + signal.SIGTERM
_MARKED = (b"error:", b"note:", b"warning:")


class HostProcess:
    """The ssh that runs launch.sh on one host."""

    def __init__(self, launch: Launch, number: int, label: bool, ended: queue.SimpleQueue[int]) -> None:
        """Start ssh. `number` is put into `ended` when it has ended."""
        self.name = launch.hosts[number].name
        self._label = label
        streams = (subprocess.PIPE, subprocess.STDOUT) if label else (None, subprocess.PIPE)
        self._process = start_ssh(launch, number, *streams)
        assert self._process.stdin is not None
        self._control = self._process.stdin
        with suppress(BrokenPipeError):  # the exit status will show it
            self._control.write(host_program(launch, number, TRAIN))
            self._control.flush()
        os.set_blocking(self._control.fileno(), False)
        threading.Thread(target=self._watch, args=(number, ended), daemon=True).start()

    def request(self, request: str) -> None:
        """Send a request. It is lost if it cannot be sent, because the connection is dead or hangs."""
        with suppress(OSError):
            os.write(self._control.fileno(), request.encode() + b"\n")

    def status(self) -> int:
        """Exit status of ssh, once it has ended; as in a shell, 128 and more for a signal."""
        status = self._process.wait()
        return 128 - status if status < 0 else status

    def _watch(self, number: int, ended: queue.SimpleQueue[int]) -> None:
        output = self._process.stdout if self._label else self._process.stderr
        assert output is not None
        relay = threading.Thread(target=self._relay, args=(output, 1 if self._label else 2), daemon=True)
        relay.start()
        self._process.wait()
        relay.join(LAST_OUTPUT_S)  # a background process of ssh (ControlPersist) may hold the pipe for longer
        ended.put(number)

    def _relay(self, source: IO[bytes], target: int) -> None:
        for line in _lines(source):
            # The reader may be gone, and output that nobody reads must not end training.
            with suppress(OSError):
                _write_line(target, self._marked(line))

    def _marked(self, line: bytes) -> bytes:
        """The line, with its host's name in front if it reports a problem, or if `--label` is given."""
        name = os.fsencode(terminal_line(self.name))
        if self._label:
            return name + b": " + line
        for mark in _MARKED:
            if line.startswith(mark):
                return mark + b" " + name + b":" + line.removeprefix(mark)
        return line


class Training:
    """launch.sh on all hosts. `stop` may be called by a signal handler while `run` waits."""

    def __init__(self, launch: Launch, label: bool) -> None:
        self._launch, self._label = launch, label
        self._running: dict[int, HostProcess] = {}
        self._stop_requests = 0
        self._failure: tuple[int, float] | None = None

    def stop(self) -> None:
        """End training at a checkpoint. A second call ends it at once, a third one by SIGKILL."""
        self._stop_requests += 1
        self._request_all("stop" if self._stop_requests < 3 else "kill")

    def run(self) -> int:
        """Start launch.sh everywhere and wait until it ends; returns the exit status of the first failed host, or 0."""
        ended: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(self._launch.hosts)):
            self._running[number] = HostProcess(self._launch, number, self._label, ended)
            if self._stop_requests:
                self._running[number].request("stop")
        while self._running:
            try:
                number = ended.get(timeout=ALIVE_S)
            except queue.Empty:
                self._request_all("here")
            else:
                self._note_end(self._running.pop(number))
            self._end_others_after_failure()
        return self._failure[0] if self._failure else 0

    def _request_all(self, request: str) -> None:
        for host in list(self._running.values()):
            host.request(request)

    def _note_end(self, host: HostProcess) -> None:
        status = host.status()
        if status == 0:
            return
        if status == CONNECTION_LOST:
            print_status(f"error: {host.name}: the connection is lost")
            status = 2
        elif status > 128 and not self._stop_requests:
            print_status(f"error: {host.name}: launch.sh was ended by {_signal_name(status - 128)}")
        elif status == TERMINATED:
            status = STOPPED  # the second request came when launch.sh had ended
        if self._failure is None:
            self._failure = status, time.monotonic()

    def _end_others_after_failure(self) -> None:
        if self._failure is None:
            return
        waited = time.monotonic() - self._failure[1]
        if waited > KILL_OTHERS_S:
            self._request_all("kill")
        elif waited > STOP_OTHERS_S and not self._stop_requests:
            self.stop()


def _lines(source: IO[bytes]) -> Iterator[bytes]:
    """The lines of a stream as soon as they are complete, without line ends."""
    pending = b""
    while chunk := os.read(source.fileno(), 1 << 16):
        *lines, pending = (pending + chunk).split(b"\n")
        yield from lines
    if pending:
        yield pending


_write_lock = threading.Lock()


def _write_line(target: int, line: bytes) -> None:
    """Write a line to a descriptor, which has no buffer that could fail when Python ends."""
    with _write_lock:
        left = line + b"\n"
        while left:
            left = left[os.write(target, left) :]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


INVALID = 2
"""Exit status after an error line."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: facts of the plan, `--`, then the user's arguments. Returns the exit status."""
    _on_signals(_abandon)
    try:
        plan, user_arguments = _parse(sys.argv[1:] if arguments is None else arguments)
        options = SshOptions.parse(user_arguments, os.environ, _working_folder())
        if options.help:
            print(USAGE, end="")
            return 0
        return _launch(plan, options)
    except LaunchError as error:
        print_status(f"error: {error}")
        return INVALID
    except Abandoned:
        return STOPPED


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The plan's facts, which launch-ssh.sh contains, and the user's arguments."""
    parser = argparse.ArgumentParser(prog="python -m pipeplan_launch.launchers.ssh", allow_abbrev=False)
    parser.add_argument("--servers", required=True, type=int, help="servers of the plan")
    parser.add_argument("--python", required=True, help="interpreter that hosts try first, as launch.sh does")
    parser.add_argument("--model-file", default="", help="file that the workers load the model from, if there is one")
    return parse_script_arguments(parser, arguments)


def _launch(plan: argparse.Namespace, options: SshOptions) -> int:
    hosts = _hosts(plan, options)
    address = options.address or hosts[0].address
    secret = handshake.read_secret(os.environ) or handshake.new_secret()
    launch = Launch(
        hosts=hosts,
        plan_folder=plan.plan,
        digest=plan.digest,
        python=plan.python,
        ssh=options.ssh,
        workdir=options.workdir,
        grace=options.grace,
        copy=options.copy,
        port=options.port,
        variables=[f"{handshake.VARIABLE}={secret}", *options.variables],
        arguments=options.launch_arguments,
    )
    with HostRequests(launch) as requests:
        if options.copy and not copy_to_all(requests, [*_model_files(plan), *options.copy_too]):
            return INVALID
        ready = check_hosts(requests, address)
        if ready is None:
            return INVALID
    training = Training(ready, options.label)
    _on_signals(training.stop)
    return training.run()


def _hosts(plan: argparse.Namespace, options: SshOptions) -> list[Host]:
    """The hosts that take part. Raises `LaunchError` for invalid options, plans or hosts files."""
    if not options.hosts_file:
        raise LaunchError("say where to run: --hosts FILE, with one host a line (--help tells more)")
    if not os.access(options.hosts_file, os.R_OK):
        raise LaunchError(f"cannot read {options.hosts_file}")
    if Path(plan.plan, "stages", "stage-0.json").is_file():  # else the hosts alone have the plan
        check_digest(plan.plan, plan.digest, "ssh")
    options.check()
    hosts = read_hosts(options.hosts_file)
    if len(hosts) < plan.servers:
        raise LaunchError(f"the plan has {plan.servers} servers, and {options.hosts_file} names {len(hosts)} hosts")
    if len(hosts) > plan.servers:
        print_status(
            f"note: only the first {plan.servers} hosts of {options.hosts_file} are used: the plan has no more servers"
        )
    return hosts[: plan.servers]


def _model_files(plan: argparse.Namespace) -> list[str]:
    """The file of the model, if it has one. If the plan is on this machine, the plan names it, because it may have
    moved.
    """
    if not Path(plan.plan, "stages", "stage-0.json").is_file():
        return [plan.model_file] if plan.model_file else []
    file = file_of(load_plan(Path(plan.plan)).model_ref)
    return [] if file is None else [str(file)]


def _working_folder() -> str:
    """The working folder by the shell's name for it, because a symbolic link in it may point elsewhere on the hosts."""
    named = os.environ.get("PWD", "")
    if os.path.isabs(named) and os.path.isdir(named) and os.path.samefile(named, "."):
        return named
    return os.getcwd()


def _on_signals(act: Callable[[], None]) -> None:
    """Let signals call `act`, except those that this process was started to ignore (nohup)."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        act()

    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)


def _abandon() -> None:
    for number in _SIGNALS:  # a further signal must not interrupt the cleanup
        signal.signal(number, signal.SIG_IGN)
    raise Abandoned


if __name__ == "__main__":
    sys.exit(main())
