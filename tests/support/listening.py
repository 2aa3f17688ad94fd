"""On which addresses a command and all that it starts listen, in a network namespace of its own.

    python listening.py COMMAND …      to be started with the prefix `NAMESPACES`; prints JSON

The machine in the namespace has addresses beside the loopback interface, and its host name means one of them. The
environment is that of a user who has set all that torch, Gloo and NCCL read for runs on other networks. The sockets of
the namespace are looked at hundreds of times a second, and Python's are noted when they begin to listen.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

NAMESPACES = ("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--kill-child")
ADDRESS, ADDRESS_6, INTERFACE = "192.0.2.7", "2001:db8::7", "door0"
HOSTILE = {
    "GLOO_SOCKET_IFNAME": INTERFACE,
    "NCCL_SOCKET_IFNAME": INTERFACE,
    "TP_SOCKET_IFNAME": INTERFACE,
    "NCCL_COMM_ID": f"{ADDRESS}:29888",
    "MASTER_ADDR": ADDRESS,
    "MASTER_PORT": "29555",
    "HOSTNAME": "door",
    "LOCAL_RANK": "1",
    "PET_STANDALONE": "1",
    "PET_NNODES": "1:4",
    "PET_RDZV_BACKEND": "c10d",
    "PET_RDZV_ENDPOINT": f"{ADDRESS}:29666",
    "PET_MASTER_ADDR": ADDRESS,
    "PET_LOCAL_ADDR": ADDRESS,
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_HEALTH_CHECK_PORT": "29777",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
_NOTE_LISTEN = """
import os, socket
_listen = socket.socket.listen
def listen(self, *arguments):
    _listen(self, *arguments)
    if self.family in (socket.AF_INET, socket.AF_INET6) and os.stat("/proc/self/ns/net").st_ino == int(
            os.environ["LISTENING_NETWORK"]):
        with open(os.environ["LISTENING_NOTES"], "a") as notes:
            print(self.getsockname()[0], file=notes)
socket.socket.listen = listen
"""
LISTENS = "0A"
_UNCONNECTED = "07"


@dataclass(frozen=True)
class Observed:
    """What a command did."""

    status: int
    listening: list[str]
    """Addresses on which something listened, for TCP or UDP."""
    output: str

    @property
    def doors(self) -> list[str]:
        """The addresses that others can reach."""
        return [one for one in self.listening if not one.startswith("127.") and one != "::1"]


@cache
def why_impossible() -> str:
    """Why this machine cannot make such a namespace; "" if it can."""
    for name in ("unshare", "ip", "mount"):
        if shutil.which(name) is None:
            return f"needs the command {name}"
    done = subprocess.run([*NAMESPACES, "sh", "-c", _set_up("/dev/null")], capture_output=True, text=True, check=False)
    return f"needs network namespaces for all users: {done.stderr.strip()}" if done.returncode else ""


def observe(command: Sequence[str], folder: Path, timeout_s: float = 300, **environment: str) -> Observed:
    """Run a command in a namespace, from a folder."""
    done = subprocess.run(
        [*NAMESPACES, "--mount-proc", sys.executable, __file__, *command],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder), **HOSTILE, **environment},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return Observed(**json.loads(done.stdout))


def _set_up(hosts: str) -> str:
    return (
        f"ip link set lo up && ip link add {INTERFACE} type veth peer name outside && ip link set {INTERFACE} up && "
        f"ip link set outside up && ip addr add {ADDRESS}/24 dev {INTERFACE} && "
        f"ip -6 addr add {ADDRESS_6}/64 dev {INTERFACE} nodad && mount --bind {hosts} /etc/hosts"
    )


def _addresses_now() -> set[str]:
    found = set()
    for name, state in (("tcp", LISTENS), ("tcp6", LISTENS), ("udp", _UNCONNECTED), ("udp6", _UNCONNECTED)):
        with suppress(OSError):
            for line in Path("/proc/net", name).read_text().splitlines()[1:]:
                _, local, remote, actual, *_ = line.split()
                if actual == state and set(remote) <= {"0", ":"}:
                    found.add(_readable(local.partition(":")[0]))
    return found


def _readable(text: str) -> str:
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def main(command: list[str]) -> None:
    """Set the namespace up, run the command, and print what was observed."""
    folder = Path(tempfile.mkdtemp(prefix="listening-"))
    notes, hosts = folder / "notes", folder / "hosts"
    notes.touch()
    hosts.write_text(f"127.0.0.1 localhost\n::1 localhost\n{ADDRESS} {socket.gethostname()} door\n")
    (folder / "sitecustomize.py").write_text(_NOTE_LISTEN)
    subprocess.run(["sh", "-c", _set_up(str(hosts))], check=True)
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    network = str(os.stat("/proc/self/ns/net").st_ino)
    variables = {"PYTHONPATH": path, "LISTENING_NOTES": str(notes), "LISTENING_NETWORK": network}
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.002):
            seen.update(_addresses_now())

    looking = threading.Thread(target=look)
    looking.start()
    done = subprocess.run(
        command, env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    over.set()
    looking.join()
    listening = sorted(seen | set(notes.read_text().split()))
    print(json.dumps({"status": done.returncode, "listening": listening, "output": done.stdout}))


if __name__ == "__main__":
    main(sys.argv[1:])
