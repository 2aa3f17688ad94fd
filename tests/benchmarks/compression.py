"""What compressing gradients among replicas, and filtering them between servers, does to bytes, accuracy and pace.

    python tests/benchmarks/compression.py [--epochs N] [--minibatch N] [--job REF] [--rate 100mbit] [--plan 2]

The bundled digits under two plans, 2 (data parallelism) and 2-1, whose two replicas are on two servers, by the
executor's own workers. Counted are the bytes that one replica hands to the network for its share of an update: of a
sum over two replicas each sends as many bytes as it has; of a broadcast the sender does. Where the kernel allows a
network namespace of one's own, the loopback interface of that counts too: everything that the run sends, per update and
replica. `--rate` shapes that interface, which then stands for one slow link that both directions share.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from pipeplan_launch.job.loading import load_job
from pipeplan_launch.tracing.trace import trace_job

WAYS = (
    (),
    ("--compress", "bf16"),
    ("--compress", "powersgd:1"),
    ("--compress", "powersgd:4"),
    ("--significance", "1%"),
    ("--significance", "10%"),
    ("--significance", "50%"),
)
CUT = "fc2"
"""The layer that the second stage of 2-1 begins with: the first has nearly all parameters."""
OWN_NETWORK = "PIPEPLAN_BENCHMARK_OWN_NETWORK"


@dataclass(frozen=True)
class Outcome:
    accuracy: list[float]
    samples_per_s: float
    counted: float
    """Bytes that one replica sends for an update."""
    seen: float | None
    """Bytes on the interface, per update and replica."""


class Counting:
    """Stands in for `torch.distributed` where replicas average; counts what this process sends."""

    def __init__(self) -> None:
        self.sent = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(dist, name)

    def all_reduce(self, tensor: torch.Tensor, *given: Any, **options: Any) -> Any:
        self.sent += tensor.numel() * tensor.element_size()
        return dist.all_reduce(tensor, *given, **options)

    def broadcast(self, tensor: torch.Tensor, source: int, *given: Any, **options: Any) -> Any:
        self.sent += tensor.numel() * tensor.element_size() * (source == dist.get_rank())
        return dist.broadcast(tensor, source, *given, **options)

    def all_gather(self, tensors: list[torch.Tensor], tensor: torch.Tensor, **options: Any) -> Any:
        self.sent += tensor.numel() * tensor.element_size()
        return dist.all_gather(tensors, tensor, **options)


def measure(job: str, replicas: Sequence[int], way: Sequence[str], epochs: int, minibatch: int) -> Outcome:
    """Train with the executor's workers."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_plan(folder, job, replicas, minibatch)
        world = sum(replicas)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch._dynamo", "pipeplan_launch.worker"])
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        given = ["--epochs", str(epochs), "--checkpoint-every", str(epochs), *way]
        arguments = [str(folder), "--run-dir", str(folder / "run"), "--threads", "1", *given]
        before = interface_bytes()
        workers = [
            context.Process(target=_work, args=(rank, world, store.port, arguments, str(folder / f"{rank}.log")))
            for rank in range(world)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if any(worker.exitcode for worker in workers):
            raise SystemExit("\n".join((folder / f"{rank}.log").read_text() for rank in range(world)))
        sent = interface_bytes() - before
        summary = json.loads((folder / "run" / "summary.json").read_text())
        counts = json.loads((folder / "0.log.counts").read_text())
    return Outcome(
        [one["test_accuracy"] for one in summary["epochs"]],
        minibatch / summary["minibatch_s"]["measured"],
        counts["sent"] / counts["updates"],
        sent / counts["updates"] / replicas[0] if os.environ.get(OWN_NETWORK) else None,
    )


def write_plan(folder: Path, job: str, replicas: Sequence[int], minibatch: int) -> None:
    """The stage files of a plan on two servers, the first with one worker."""
    traced = trace_job(load_job(job, 0), 8)
    layers: list[list[str]] = [[]]
    for layer in traced.layers:
        if layer.name == CUT and len(replicas) > 1:
            layers.append([])
        layers[-1].append(layer.name)
    ranks = iter(range(sum(replicas)))
    stages = [
        {"workers": [next(ranks) for _ in range(count)], "depth": depth, "versions": depth + 1}
        for count, depth in zip(replicas, (1,) if len(replicas) == 1 else (2, 1), strict=True)
    ]
    (folder / "stages").mkdir()
    for stage, names in enumerate(layers):
        content = {
            "format": "pipeplan-stage",
            "version": 1,
            "plan": "sha256:benchmark",
            "mode": "training",
            "model": {"ref": job, "graph_hash": traced.graph_hash},
            "minibatch": minibatch,
            "device": "cpu",
            "servers": 2,
            "workers_per_server": sum(replicas) - 1,
            "server_sizes": [1, sum(replicas) - 1],
            "schedule": {"name": "1f1b-stashing"},
            "pipeline": stages,
            "stage": stage,
            "layers": names,
        }
        (folder / "stages" / f"stage-{stage}.json").write_text(json.dumps(content))


def _work(rank: int, world: int, port: int, arguments: Sequence[str], log: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    from pipeplan_launch import __main__
    from pipeplan_launch.comm import gaia_filter, gradient_allreduce, gradient_compression

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    counting, updates = Counting(), [0]
    for module in (gradient_allreduce, gradient_compression, gaia_filter, default_hooks, powerSGD_hook):
        module.dist = counting  # type: ignore[attr-defined]
    start = gradient_allreduce.GradientReducer.start

    def counted_start(self: Any, of: Any) -> None:
        updates[0] += 1
        start(self, of)

    gradient_allreduce.GradientReducer.start = counted_start  # type: ignore[method-assign]
    with open(log, "w") as sink:
        sys.stdout = sys.stderr = sink
        status = __main__.main(arguments)
    Path(log + ".counts").write_text(json.dumps({"sent": counting.sent, "updates": updates[0]}))
    os._exit(status)


def interface_bytes() -> int:
    """What has left by the loopback interface."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "lo":
            return int(counts.split()[8])
    return 0


def into_own_network(rate: str | None) -> None:
    """Start again in a network namespace, where nobody else uses the loopback interface; go on here if that fails."""
    if os.environ.get(OWN_NETWORK) is not None:
        return
    up = "ip link set lo up"
    if rate is not None:
        up = f"ip link set lo up mtu 9000 && tc qdisc add dev lo root tbf rate {rate} burst 64k latency 200ms"
    enter = ["unshare", "-Urn", "sh", "-c"]
    works = shutil.which("unshare") is not None and subprocess.run([*enter, up], check=False).returncode == 0
    if rate is not None and not works:
        raise SystemExit("--rate needs a network namespace, and tc")
    os.environ[OWN_NETWORK] = "1" if works else ""
    if works:
        os.execvp(enter[0], [*enter, f'{up} && exec "$@"', "sh", sys.executable, *sys.argv])


def main() -> None:
    """Print a table for each plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--minibatch", type=int, default=16)
    parser.add_argument("--job", default="mnist")
    parser.add_argument("--rate", help="as tc has it, such as 100mbit")
    parser.add_argument("--plan", choices=["2", "2-1"], help="this one only")
    given = parser.parse_args()
    into_own_network(given.rate)
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # in there no name is found for 127.0.0.1, which torch warns of
    torch.set_num_threads(1)
    console = Console(width=160)
    for plan in [given.plan] if given.plan else ["2", "2-1"]:
        replicas = [int(count) for count in plan.split("-")]
        over = f", over {given.rate}" if given.rate else ""
        table = Table(title=f"{given.job}, plan {plan}, minibatch {given.minibatch}{over}", title_justify="left")
        for heading in ("", "kB an update, counted", "on the interface", "samples/s"):
            table.add_column(heading, justify="right" if heading else "left")
        for epoch in range(given.epochs):
            table.add_column(f"%, {epoch + 1}" if epoch == 0 else str(epoch + 1), justify="right")
        for way in WAYS:
            outcome = measure(given.job, replicas, way, given.epochs, given.minibatch)
            table.add_row(
                " ".join(way) or "exact mean",
                f"{outcome.counted / 1e3:.0f}",
                "–" if outcome.seen is None else f"{outcome.seen / 1e3:.0f}",
                f"{outcome.samples_per_s:.0f}",
                *(f"{100 * value:.1f}" for value in outcome.accuracy),
            )
        console.print(table)


if __name__ == "__main__":
    main()
