"""How fast messages travel between two workers of this machine, by each way that a run may take.

`python -m pipeplan_launch.selftest.transport_benchmark cpu|cuda` is one of the two workers. The first prints one line
of JSON: for every way the seconds that a small message takes, and the bytes per second of a large one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from pipeplan_launch.comm.ordered_transport import OrderedTransport
from pipeplan_launch.comm.p2p import MessageTensor, Transport
from pipeplan_launch.devices.backend import Backend, backend_of
from pipeplan_launch.elastic.local_workers import stay_on_loopback
from pipeplan_launch.plan.communication_order import Direction
from pipeplan_launch.plan.transport_modes import GLOO, NCCL
from pipeplan_launch.selftest.cases import Result

SMALL, LARGE = 2, 2 * 2**20
"""Numbers in a small and in a large message, of 8 bytes each."""
SMALL_ROUNDS, LARGE_ROUNDS = 50, 6
PATIENCE_S = 40.0


def measure_paths(device: str) -> list[Result]:
    """Start both workers, and return what they measured, one result a way."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "pipeplan_launch.supervisor", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "pipeplan_launch.selftest.transport_benchmark", device]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment)
        measured = json.loads(done.stdout.strip().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return [Result("messages", False, "two workers could not measure them", time.perf_counter() - began)]
    return [
        Result(
            f"messages, {way}",
            True,
            f"{figures['latency_s'] * 1e6:.0f} µs for a small one, {figures['bytes_per_s'] * 8e-9:.1f} Gbit/s",
            figures=figures,
        )
        for way, figures in measured.items()
    ]


def _main(kind: str) -> None:
    rank, backend = int(os.environ["RANK"]), backend_of(kind)
    own_each = len(backend.cards()) != 1
    device = backend.select(int(os.environ["LOCAL_RANK"]))
    names = backend.process_groups(own_each)
    stay_on_loopback(os.environ)
    dist.init_process_group(
        names,
        timeout=timedelta(seconds=PATIENCE_S / 2),
        device_id=device if "nccl" in names else None,
    )
    found = {}
    for way in (GLOO, NCCL) if not backend.copies_to_host or "nccl" in names else (GLOO,):
        found[way] = _measure(rank, backend, device, _transport(way, rank, device, names))
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()


def _transport(way: str, rank: int, device: torch.device, names: str) -> Transport | OrderedTransport:
    if way == GLOO:
        return Transport(rank, rank, device, dist.new_group([0, 1], backend="gloo"))
    groups = {edge: dist.new_group([0, 1], backend=names) for edge in ((0, 1), (1, 0))}
    return OrderedTransport(rank, rank, device, groups, dist.barrier)


def _measure(
    rank: int, backend: Backend, device: torch.device, transport: Transport | OrderedTransport
) -> dict[str, float]:
    if isinstance(transport, OrderedTransport):
        transport.open()
    number = 0

    def there_and_back(numbers: int) -> Callable[[], None]:
        """A message from worker 0 to worker 1 and back, on the memory of the device."""
        content, layout = (
            torch.zeros(numbers, dtype=torch.float64, device=device),
            [MessageTensor((numbers,), torch.float64)],
        )

        def once() -> None:
            nonlocal number
            for source in (0, 1):
                if rank == source:
                    transport.send(Direction.ACTIVATIONS, number, 1 - rank, [content])
                    if isinstance(transport, OrderedTransport):
                        transport.start_send(Direction.ACTIVATIONS, number, 1 - rank)
                    transport.settle(Direction.ACTIVATIONS, number)
                else:
                    transport.post(Direction.ACTIVATIONS, number, source, layout)
                    if isinstance(transport, OrderedTransport):
                        transport.start_receive(Direction.ACTIVATIONS, number, source, layout, number, 2)
                    transport.take(Direction.ACTIVATIONS, number)
                    if isinstance(transport, OrderedTransport):
                        transport.release(Direction.ACTIVATIONS, number)
                number += 1
            backend.synchronise(device)

        return once

    small = _seconds(there_and_back(SMALL), SMALL_ROUNDS) / 2
    large = _seconds(there_and_back(LARGE), LARGE_ROUNDS) / 2
    return {"latency_s": small, "bytes_per_s": LARGE * 8 / large}


def _seconds(once: Callable[[], None], rounds: int) -> float:
    """Mean seconds of a call, after two that do not count."""
    once()
    once()
    began = time.perf_counter()
    for _ in range(rounds):
        once()
    return (time.perf_counter() - began) / rounds


if __name__ == "__main__":
    _main(sys.argv[1])
    sys.stdout.flush()
    os._exit(0)
