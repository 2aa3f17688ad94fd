"""Launches on networks of their own, with an attacker or with a link that is cut; prints what came of it, as JSON.

    python attackers.py KIND SCRIPT RUN OPTION …     to be started with the prefix `network_namespaces.OWN_NAMESPACES`

Every server is a network namespace, and so is the attacker's machine; cables join them. KIND is:

    two-servers    The attacker does not know the secret. Before server 1 is there, it joins as server 1: by a launcher
                   of its own with another secret, by a client of torch's store, and by a handshake. Once the run has a
                   checkpoint, it tries every TCP port of server 0: it counts, deletes and overwrites keys of a store,
                   puts a pickle into a rendezvous' state, asks for a stop, and sends garbage.
    cut SECONDS    Once the run has a checkpoint, the link of server 1 is cut for so long, 0 for ever. After a cut that
                   ends, the run has to go on; then server 0 is asked to stop.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from network_namespaces import Network, NetworkNode, start_in_namespace
from torch.distributed import TCPStore

from pipeplan_launch.elastic import handshake
from pipeplan_launch.elastic.handshake import HandshakeFailed, Purpose

VICTIM, PORT = "10.0.0.1", 29500
SECRET, GUESS = "the secret of both servers", "a guess that is long enough"
STORE_HELLO = b"\x0b\x3c\x85\x5c\x00"
"""torch's magic number of a TCPStore, as a client sends it first."""
KEYS = ("pipeplan/attempt", "pipeplan/over", "pipeplan/run", "torch.rendezvous.none", "none/torchelastic/role")
PATIENCE_S, STORE_PATIENCE_S = 120, 5


def two_servers(script: str, run: str, options: list[str]) -> dict[str, Any]:
    """Launch server 0, attack, launch server 1, attack, stop.

    Returns `joined` (status of the attacker's launcher), `early` and `late` (open ports, and what these let one do),
    whether the run goes on, whether the pickle was `owned`, and the statuses of the launches after a stop.
    """
    (zero, _), (one, _), (outside, _) = _machines(3).servers
    folder, metrics = Path(run).parent, Path(f"{run}/metrics/rank-1.jsonl")

    def attack(name: str, ports: Iterable[int]) -> dict[str, Any]:
        _status_of(start_in_namespace(outside, lambda: _attack_doors(ports, folder / name)))
        found: dict[str, Any] = json.loads((folder / name).read_text())
        return found

    first = start_in_namespace(zero, lambda: _launch(script, run, options, 0, SECRET, f"{run}.0.log"))
    stolen = lambda: _launch(script, f"{run}-stolen", options, 1, GUESS, f"{run}.x.log")  # noqa: E731
    answer: dict[str, Any] = {"joined": _status_of(start_in_namespace(outside, stolen))}
    answer["early"] = attack("early.json", [PORT])
    second = start_in_namespace(one, lambda: _launch(script, run, options, 1, SECRET, f"{run}.1.log"))
    _wait_for_checkpoint(run, f"{run}.0.log")
    answer["late"] = attack("late.json", range(1, 1 << 16))
    done = metrics.stat().st_size
    time.sleep(2)
    answer |= {"goes_on": metrics.stat().st_size > done, "owned": (folder / "owned").exists()}
    os.kill(first, signal.SIGTERM)
    return answer | {"statuses": [_status_of(first), _status_of(second)]}


def cut(seconds: str, script: str, run: str, options: list[str]) -> list[int]:
    """Launch both servers, and cut: the statuses of both."""
    network = _machines(2)
    pids = [
        start_in_namespace(name, lambda node=node: _launch(script, run, options, node, SECRET, f"{run}.{node}.log"))  # type: ignore[misc]
        for node, (name, _) in enumerate(network.servers)
    ]
    _wait_for_checkpoint(run, f"{run}.0.log")
    switch, interface = network.ports[1]
    port = ["ip", "-n", switch, "link", "set", interface]
    subprocess.run([*port, "down"], check=True)
    if float(seconds):
        time.sleep(float(seconds))
        subprocess.run([*port, "up"], check=True)
        metrics = Path(f"{run}/metrics/rank-1.jsonl")
        done, deadline = metrics.stat().st_size, time.monotonic() + PATIENCE_S
        while metrics.stat().st_size <= done and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(pids[0], signal.SIGTERM)
    return [_status_of(pid) for pid in pids]


def _machines(count: int) -> Network:
    return Network(NetworkNode(below=tuple(NetworkNode(workers=1) for _ in range(count))))


def _launch(script: str, run: str, options: list[str], node: int, secret: str, log: str) -> None:
    """Become the launch.sh of one of several servers, whose output goes to a file."""
    os.environ |= {"NODE_RANK": str(node), "MASTER_PORT": str(PORT), "PIPEPLAN_SECRET": secret}
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.execv(script, [script, "--run-dir", run, *options])


def _wait_for_checkpoint(run: str, log: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not list(Path(run).glob("checkpoints/*/manifest.json")):
        if time.monotonic() > deadline:
            raise SystemExit(f"the launch has no checkpoint: {Path(log).read_text()[-2000:]}")
        time.sleep(0.1)


def _status_of(pid: int) -> int:
    """The exit status of a process, once it ends."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _open_ports(ports: Iterable[int]) -> list[int]:
    """The ports of server 0 that accept a connection."""
    opened = []
    for port in ports:
        with socket.socket() as probe:
            probe.settimeout(5)
            if probe.connect_ex((VICTIM, port)) == 0:
                opened.append(port)
    return opened


def _attack_doors(ports: Iterable[int], found: Path) -> None:
    """Write down which ports are open, and what each lets a stranger do."""
    opened = _open_ports(ports)
    doors = {port: [*_as_store(port, found.with_name("owned")), *_as_gateway(port)] for port in opened}
    found.write_text(json.dumps({"open": opened, "doors": {port: done for port, done in doors.items() if done}}))


class Payload:
    """An object whose unpickling leaves a folder."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def _as_store(port: int, pickled: Path) -> list[str]:
    """What a store at a port lets a stranger do.

    In a process of its own that an alarm ends, because torch's client waits without end for what is no store.
    """
    notes = pickled.with_name("done.txt")
    notes.write_text("")
    child = os.fork()
    if not child:
        signal.alarm(STORE_PATIENCE_S)
        try:
            _use_store(port, pickled, notes)
        except Exception as refused:
            print(f"port {port}: {str(refused)[:100]}", file=sys.stderr, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
    return notes.read_text().splitlines()


def _use_store(port: int, pickled: Path, notes: Path) -> None:
    """Do all that one can with a store, and note what worked."""
    with notes.open("a", buffering=1) as done:
        store = TCPStore(VICTIM, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
        print("connect", file=done)
        for key in KEYS:
            store.set(key, pickle.dumps(Payload(str(pickled))))
            print(f"set {key}", file=done)
            store.delete_key(key)
            print(f"delete {key}", file=done)
        store.num_keys()
        print("count", file=done)


def _as_gateway(port: int) -> list[str]:
    """What a gateway lets one do who guesses the secret, or does not answer its challenge."""
    done = []
    for purpose in Purpose:
        with suppress(HandshakeFailed, OSError):
            handshake.connect(VICTIM, port, GUESS.encode(), purpose, 1, 3.0).close()
            done.append(purpose.name)
    for words in (b"x" * 200, STORE_HELLO + os.urandom(1 << 16)):
        with suppress(OSError), socket.create_connection((VICTIM, port), timeout=3) as probe:
            probe.sendall(words)
    return done


if __name__ == "__main__":
    kind, *words = sys.argv[1:]
    if kind == "cut":
        seconds, script, run, *options = words
        print(json.dumps(cut(seconds, script, run, options)))
    else:
        script, run, *options = words
        print(json.dumps(two_servers(script, run, options)))
