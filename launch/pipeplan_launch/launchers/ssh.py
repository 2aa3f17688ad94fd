"""`python -m pipeplan_launch.launchers.ssh PLAN_FOLDER …`: starts a plan on several hosts. launch-ssh.sh calls it.

1. With `--copy`, it copies the plan and the file of its model to all hosts.
2. It runs launch.sh on all hosts, each with its own NODE_RANK, and prints their lines with the names of the hosts.
3. It passes requests to stop on to all hosts. If a host fails, it ends the others.

Each host reads requests from the standard input of its ssh: `stop` ends training at a checkpoint, `kill` ends it at
once, and `here` only says that this script is alive. A host stops at a checkpoint by itself if its input ends, or
brings nothing for a minute (`host_supervisor`).
"""

from __future__ import annotations

import argparse
import math
import os
import re
import secrets
import shlex
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO

from pipeplan_launch.command_line import OptionParser, whole_number_between
from pipeplan_launch.elastic import handshake
from pipeplan_launch.errors import LaunchError, listed, print_status, terminal_line
from pipeplan_launch.job_reference import file_of
from pipeplan_launch.launchers.hosts_file import Host, read_hosts
from pipeplan_launch.plan.launch_plan import LaunchPlan
from pipeplan_launch.plan.stage_files import load_plan

POLL_S = 0.5
STOP_OTHERS_S, KILL_OTHERS_S = 10.0, 30.0
"""Times after the first failure at which the other hosts are stopped, and killed. Before that most hosts fail by
themselves, and report why."""
LAST_OUTPUT_S = 5.0
FIRST_PORT, PORTS = 20_000, 10_000
CONNECTION_LOST = 255
"""Exit status of ssh for an error of its own."""
INVALID, STOPPED = 2, 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SSH_OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4"),
)

HOSTS_HELP = """\
The hosts file has one host a line, in the order of the plan's servers; # begins a comment:
  user@host [port=N] [folder=DIR] [python=PATH] [address=ADDR] [NAME=VALUE …]
    folder   where the plan lies on the host (the same path as here)
    python   an interpreter on the host that has pipeplan
    address  the address at which the others reach the first host
    NAME     a variable, in capitals
"""
CLOSING_HELP = """\
All other options go to launch.sh on every host: see `launch.sh --help`.
Ctrl-C ends training at a checkpoint; a second one ends it at once.
"""


def ssh_parser() -> argparse.ArgumentParser:
    """The parser of the script's options."""
    parser = OptionParser(
        prog="launch-ssh.sh",
        usage="launch-ssh.sh --hosts FILE [options] [options of launch.sh]",
        description=HOSTS_HELP,
        epilog=CLOSING_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--hosts", required=True, metavar="FILE", help="the hosts file")
    add(
        "--env",
        type=_assignment,
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable on all hosts; without VALUE, to its value here; may be given again",
    )
    add("--workdir", default=_working_folder(), metavar="DIR", help="the folder to work in, on all hosts (this one)")
    add("--copy", action="store_true", help="first copy the plan and its model's file to the hosts, to the same paths")
    add(
        "--with",
        dest="more",
        action="append",
        default=[],
        metavar="PATH",
        help="with --copy: copy this file or folder too; may be given again",
    )
    add(
        "--address",
        default=os.environ.get("MASTER_ADDR"),
        metavar="ADDR",
        help="the address at which the others reach the first host (MASTER_ADDR; the one that ssh uses)",
    )
    add(
        "--port",
        type=whole_number_between(1, 65535),
        default=os.environ.get("MASTER_PORT") or FIRST_PORT + secrets.randbelow(PORTS),
        metavar="N",
        help="a free port of the first host (MASTER_PORT; a random one)",
    )
    add("--ssh", type=shlex.split, default=["ssh"], metavar="COMMAND", help="run this command instead of ssh")
    add(
        "--grace",
        type=whole_number_between(1, 999_999),
        default=300,
        metavar="S",
        help="seconds that a checkpoint may take after this script or its connection is gone (300)",
    )
    return parser


def _assignment(text: str) -> str:
    """NAME=VALUE, from NAME=VALUE or the name of a variable of this process."""
    name, equals, _ = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise argparse.ArgumentTypeError(f"it takes NAME or NAME=VALUE, not {text!r}")
    if not equals and name not in os.environ:
        raise argparse.ArgumentTypeError(f"the variable {name} is not set here")
    return text if equals else f"{name}={os.environ[name]}"


def _working_folder() -> str:
    """The working folder by the shell's name for it, because a symbolic link in it may point elsewhere on the hosts."""
    named = os.environ.get("PWD", "")
    return named if os.path.isdir(named) and os.path.samefile(named, ".") else os.getcwd()


class Launch:
    """A plan and the hosts that run it, and the commands that run programs on them."""

    def __init__(self, plan_folder: Path, options: argparse.Namespace, arguments: Sequence[str]) -> None:
        """`arguments`: the arguments of launch.sh. Raises `LaunchError` if the plan or the hosts file is invalid."""
        self.plan_folder, self.options, self._arguments = plan_folder, options, arguments
        self.plan: LaunchPlan = load_plan(plan_folder)
        self.hosts = read_hosts(options.hosts)
        servers = self.plan.servers
        if len(self.hosts) < servers:
            raise LaunchError(f"the plan has {servers} servers, and {options.hosts} names {len(self.hosts)} hosts")
        if len(self.hosts) > servers:
            print_status(
                f"note: only the first {servers} hosts of {options.hosts} are used: the plan has no more servers"
            )
            self.hosts = self.hosts[:servers]
        self._address = options.address or self.hosts[0].address or self._address_of_first()
        self._secret = handshake.read_secret(os.environ) or handshake.new_secret()

    def ssh(self, host: Host, program: str, *arguments: str) -> list[str]:
        """The ssh command that runs a program of bash, whatever the login shell of the host is."""
        port = ["-p", host.port] if host.port else []
        command = shlex.join(["exec", "bash", "-c", program, "bash", *arguments])
        return [*self.options.ssh, *_SSH_OPTIONS, *port, "--", host.name, command]

    def folder(self, host: Host) -> str:
        """The plan folder on a host; a relative path starts at the host's home folder."""
        return (host.folder or str(self.plan_folder)).removeprefix("~/")

    def program(self, number: int) -> bytes:
        """The program that runs launch.sh on a host. ssh reads it from stdin, because other users can see arguments."""
        host = self.hosts[number]
        variables = [f"NODE_RANK={number}", f"NNODES={len(self.hosts)}", f"MASTER_ADDR={self._address}"]
        variables += [f"MASTER_PORT={self.options.port}", f"{handshake.VARIABLE}={self._secret}"]
        lines = [f"export {shlex.join([*variables, *self.options.env, *host.variables])}"]
        if host.python:
            home = '"$HOME"/' if host.python.startswith("~/") else ""
            lines.append(f"export PYTHON={home}{shlex.quote(host.python.removeprefix('~/'))}")
        values = {"folder": self.folder(host), "digest": self.plan.plan, "python": sys.executable}
        lines += [f"{name}={shlex.quote(value)}" for name, value in values.items()]
        lines += [_FIND_PLAN, f"cd -- {shlex.quote(self.options.workdir)} || exit 2", _FIND_PYTHON]
        run = f'exec "$python" -m pipeplan_launch.launchers.host_supervisor {self.options.grace} "$folder/launch.sh" '
        lines.append(run + shlex.join(self._arguments))
        return os.fsencode("\n".join(lines)) + b"\0"

    def _address_of_first(self) -> str:
        """The address at which ssh reaches the first host. ssh's settings may map the hosts file's name to another."""
        command = [*self.options.ssh, "-G", "--", self.hosts[0].name]
        with suppress(OSError):
            done = subprocess.run(command, capture_output=True, text=True, errors="surrogateescape", check=False)
            if found := re.search(r"^hostname (\S+)$", done.stdout, re.MULTILINE):
                return found[1]
        return self.hosts[0].name.rpartition("@")[2]


_READ_PROGRAM = 'IFS= read -r -d "" program; eval "$program"'
_FIND_PLAN = """\
[[ "$folder" == /* ]] || folder="$HOME/$folder"
if ! grep -qsF -- "$digest" "$folder/stages/stage-0.json"; then
  printf 'error: %s does not hold this plan: --copy brings it there\\n' "$folder" >&2
  exit 2
fi"""
_FIND_PYTHON = """\
[[ -x "$python" ]] || python=python3
python="${PYTHON:-$python}\""""
_UNPACK = 'mkdir -p -- "$@" && tar --no-same-owner -C "$1" -xf -'


def copy_to_hosts(launch: Launch) -> None:
    """Copy the plan without its runs, the file of its model and the paths of `--with` to all hosts, with tar.

    Archives are complete before they are sent, because a host may share these files (NFS). Raises `LaunchError`.
    """
    model = file_of(launch.plan.model_ref)
    others = [*([] if model is None else [model]), *map(os.path.abspath, launch.options.more)]
    with tempfile.TemporaryDirectory() as folder:
        plan, rest = Path(folder, "plan.tar"), Path(folder, "rest.tar")
        with tarfile.open(plan, "w") as archive:
            archive.add(launch.plan_folder, ".", filter=lambda file: None if file.name == "./runs" else file)
        with tarfile.open(rest, "w") as archive:
            for path in others:
                archive.add(path)
        _unpack(launch, plan, [launch.folder(host) for host in launch.hosts])
        _unpack(launch, rest, ["/"] * len(launch.hosts))


def _unpack(launch: Launch, archive: Path, targets: Sequence[str]) -> None:
    """Unpack an archive on all hosts at the same time, in these folders. Raises `LaunchError`."""
    started = []
    for host, target in zip(launch.hosts, targets, strict=True):
        with archive.open("rb") as stdin:
            started.append(subprocess.Popen(launch.ssh(host, _UNPACK, target, launch.options.workdir), stdin=stdin))
    failed = [host.name for host, process in zip(launch.hosts, started, strict=True) if process.wait()]
    if failed:
        raise LaunchError(f"nothing could be copied to {listed(failed)}")


class HostProcess:
    """The ssh that runs launch.sh on one host."""

    def __init__(self, launch: Launch, number: int) -> None:
        host = launch.hosts[number]
        self.name = terminal_line(host.name)
        pipe = subprocess.PIPE
        # In a process group of its own, ssh does not receive Ctrl-C from the terminal.
        self._process = subprocess.Popen(
            launch.ssh(host, _READ_PROGRAM), stdin=pipe, stdout=pipe, stderr=pipe, process_group=0
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._relays = [
            threading.Thread(target=_relay, args=(source, target, os.fsencode(f"{self.name}: ")), daemon=True)
            for source, target in ((self._process.stdout, 1), (self._process.stderr, 2))
        ]
        for relay in self._relays:
            relay.start()
        self._requests = self._process.stdin
        with suppress(BrokenPipeError):  # the exit status will show it
            self._requests.write(launch.program(number))
            self._requests.flush()
        os.set_blocking(self._requests.fileno(), False)

    def request(self, request: str) -> None:
        """Send a request. It is lost if it cannot be sent, because the connection is dead or hangs."""
        with suppress(OSError):
            os.write(self._requests.fileno(), request.encode() + b"\n")

    def status(self) -> int | None:
        """Exit status of ssh, as in a shell: 128 and more for a signal; None while it runs."""
        status = self._process.poll()
        if status is not None:
            for relay in self._relays:
                relay.join(LAST_OUTPUT_S)  # a background process of ssh (ControlPersist) may hold the pipe for longer
        return 128 - status if status is not None and status < 0 else status


_write_lock = threading.Lock()


def _relay(source: IO[bytes], target: int, prefix: bytes) -> None:
    """Write the lines of a stream to a descriptor. If nobody reads them any more, training goes on."""
    for line in source:
        left = prefix + line.removesuffix(b"\n") + b"\n"
        with suppress(OSError), _write_lock:
            while left:
                left = left[os.write(target, left) :]


class Training:
    """launch.sh on all hosts. `stop` may be called by a signal handler while `run` waits."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._running: list[HostProcess] = []
        self._stop_requests = 0

    def stop(self) -> None:
        """End training at a checkpoint. A second call ends it at once, a third one by SIGKILL."""
        self._stop_requests += 1
        self._request_all("stop" if self._stop_requests < 3 else "kill")

    def run(self) -> int:
        """Start launch.sh everywhere and wait until it ends; returns the exit status of the first failed host, or 0."""
        for number in range(len(self._launch.hosts)):
            self._running.append(HostProcess(self._launch, number))
            if self._stop_requests:
                self._running[-1].request("stop")
        failure, failed_s = 0, math.inf
        while self._running:
            time.sleep(POLL_S)
            self._request_all("here")
            for host in list(self._running):
                if (status := host.status()) is None:
                    continue
                self._running.remove(host)
                if status and not failure:
                    failure, failed_s = INVALID if status == CONNECTION_LOST else status, time.monotonic()
                self._report(host, status)
            waited_s = time.monotonic() - failed_s
            if waited_s > KILL_OTHERS_S:
                self._request_all("kill")
            elif waited_s > STOP_OTHERS_S and not self._stop_requests:
                self.stop()
        return failure

    def _report(self, host: HostProcess, status: int) -> None:
        """Print an error that launch.sh cannot report itself."""
        if status == CONNECTION_LOST:
            print_status(f"error: {host.name}: the connection is lost")
        elif status > 128 and not self._stop_requests:
            print_status(f"error: {host.name}: launch.sh was ended by signal {status - 128}")

    def _request_all(self, request: str) -> None:
        for host in list(self._running):
            host.request(request)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line: the plan folder, then the user's arguments. Returns the exit status."""
    folder, *words = sys.argv[1:] if arguments is None else arguments
    parser = ssh_parser()
    options, launch_arguments = parser.parse_known_args(words)
    if options.more and not options.copy:
        parser.error("--with names a file to copy besides the plan: add --copy")
    try:
        launch = Launch(Path(folder).absolute(), options, launch_arguments)
        if options.copy:
            copy_to_hosts(launch)
        training = Training(launch)
        _on_signals(training)
        return training.run()
    except LaunchError as error:
        print_status(f"error: {error}")
        return INVALID
    except OSError as error:  # ssh is not installed, or a file to copy cannot be read
        print_status(f"error: {error.filename}: {error.strerror}")
        return INVALID
    except KeyboardInterrupt:
        return STOPPED


def _on_signals(training: Training) -> None:
    """Let signals stop training, except those that this process was started to ignore (nohup)."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        training.stop()

    for number in _SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)


if __name__ == "__main__":
    sys.exit(main())
