"""Whether `pipeplan profile --links` finds the levels and rates of a network that is known.

    PYTHONPATH=tests/support python tests/benchmarks/links.py [NAME …] [--runs N]

Networks of namespaces on this machine, with cables shaped to the rates given; every worker is a process that runs
`pipeplan profile --links` as a server with one worker. The table has, for every level, the rate that was set and what
the written file says of its link, of a message and of an all-reduce, as shares of it (of the slowest card, where they
differ). Then, apart from the probe, plain all-reduces of 2 MiB among all workers and messages between the first and the
last are timed, and the last row has what the file predicts of them, over the time measured. A cable carries 99.3% of
its rate as data.

    two-by-two    2 servers of 2 workers: the loopback interface inside, 400 Mbit/s between
    tree          2 groups of 2 servers of 2 workers, each behind a cable of its own: 400, 200 and 60 Mbit/s
    cards         4 servers of 2 workers; cards of 400, 400, 100 and 100 Mbit/s
    unequal       servers of 3 and 1 workers, 200 Mbit/s
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from network_namespaces import Network, NetworkNode
from peers_run import INSIDE, in_own_network
from rich.console import Console
from rich.table import Table

from pipeplan import cli
from pipeplan.cli.profile import links as _command  # noqa: F401  imported before the workers are forked
from pipeplan.cluster_data import cluster_toml
from pipeplan.cluster_data.cluster import Cluster
from pipeplan.cluster_data.links import Links
from pipeplan.cost import formulas
from pipeplan_measure import links as _joined  # noqa: F401

MBIT = 1.25e5
SIZE = 2**21
"""Bytes of what is timed apart from the probe."""


@dataclass(frozen=True)
class Case:
    """A network, and the levels that it should be found to have."""

    root: NetworkNode
    counts: tuple[int, ...]
    rates: tuple[float | None, ...]
    """Of every level, Mbit/s; None where nothing was set."""
    cards: tuple[float, ...] = ()
    """Of every server, where they differ."""
    sizes: tuple[int, ...] = ()
    """Of every server, where they differ."""


def behind(rate: str, *below: NetworkNode) -> NetworkNode:
    """A switch and its cable."""
    return NetworkNode(rate, 0, below)


CASES = {
    "two-by-two": Case(behind("", *[NetworkNode("400mbit", 2)] * 2), (2, 2), (None, 400)),
    "tree": Case(
        behind("", *[behind("60mbit", *[behind("200mbit", *[NetworkNode("400mbit", 1)] * 2)] * 2)] * 2),
        (1, 2, 2, 2),
        (None, 400, 200, 60),
    ),
    "cards": Case(
        behind("", *[NetworkNode("400mbit", 2)] * 2, *[NetworkNode("100mbit", 2)] * 2),
        (2, 4),
        (None, 400),
        cards=(400, 400, 100, 100),
    ),
    "unequal": Case(
        behind("", NetworkNode("200mbit", 3), NetworkNode("200mbit", 1)), (3, 2), (None, 200), sizes=(3, 1)
    ),
}


def run_in(network: Network, work: Callable[[], object], port: int) -> list[int]:
    """Do some work in a process for every worker; their exit statuses, of which a signal's is negative."""
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in network.start(work, port)]


def survey(network: Network, output: Path, port: int) -> float:
    """Write the cluster file; the seconds that it took. Raises RuntimeError if a worker fails."""

    def work() -> None:
        os.environ["NODE_RANK"], servers = os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
        starts = ["--servers", servers, "--workers", "1", "--device", "cpu"]
        sys.argv = ["pipeplan", "profile", "--links", *starts, "-o", str(output), "--force"]
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  this process ends with it
        cli.main()

    began = time.perf_counter()
    statuses = run_in(network, work, port)
    if any(statuses):
        raise RuntimeError(f"pipeplan profile --links ended with {statuses}")
    return time.perf_counter() - began


def bare(network: Network, folder: Path, port: int) -> tuple[float, float]:
    """Seconds of an all-reduce among all, and of a message from the first to the last, by torch.distributed alone."""

    def work() -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        rank, last = dist.get_rank(), dist.get_world_size() - 1
        values, times = torch.zeros(SIZE // 4), []
        for _ in range(5):
            dist.barrier()
            began = time.perf_counter()
            dist.all_reduce(values)
            times.append(time.perf_counter() - began)
        ways: list[float] = []
        if rank in (0, last):
            # Posted ahead, as the executor does: a sender waits for word of that.
            receives = [dist.irecv(values.clone(), last - rank, tag=tag) for tag in range(6)]
            for tag, receive in enumerate(receives):
                began = time.perf_counter()
                for one in (dist.isend(values, last - rank, tag=tag), receive):
                    assert one is not None
                    one.wait()
                ways.append(time.perf_counter() - began)
        if rank == 0:
            (folder / "bare").write_text(f"{median(times[1:])} {median(ways[1:])}")
        dist.barrier()

    if any(run_in(network, work, port)):
        raise RuntimeError("a bare all-reduce failed")
    reduced, sent = map(float, (folder / "bare").read_text().split())
    return reduced, sent


def rows(case: Case, cluster: Cluster) -> list[list[str]]:
    """Per level: its name and count, the rate set, and link, message and all-reduce as shares of it."""
    found, links = [], Links.of(cluster)
    slowest = float("inf")
    for number, level in enumerate(cluster.levels):
        row = [level.name, str(level.count)]
        set_to = case.rates[number] if number < len(case.rates) else None
        if level.count == 1 or set_to is None:
            found.append([*row, "-", _mbit(level.bandwidth), _mbit(links.rates[number + 1].sendrecv.max()), "", ""])
            continue
        slowest = min(slowest, set_to, *case.cards)
        rates = links.rates[number + 1]
        shares = [level.bandwidth / (set_to * MBIT)]
        shares += [float(rate.min()) / (slowest * MBIT) for rate in (rates.sendrecv, rates.allreduce)]
        cards = " ".join(_mbit(machine.card) for machine in cluster.machines) if number == 1 else ""
        found.append([*row, f"{set_to:g}", *(f"{share:.3f}" for share in shares), cards])
    return found


def right(case: Case, cluster: Cluster) -> bool:
    """Whether the levels are those of the network."""
    sizes = not case.sizes or cluster.server_sizes == case.sizes
    cards = not case.cards or len({round(one.card / MBIT, -1) for one in cluster.machines}) > 1
    return tuple(level.count for level in cluster.levels) == case.counts and sizes and cards


def measure(name: str, run: int) -> None:
    """One network: its table."""
    case = CASES[name]
    network = Network(case.root)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"{name}.toml")
        took = survey(network, file, 29500 + run)
        reduced, sent = bare(network, Path(folder), 29600 + run)
        cluster = cluster_toml.load_cluster(str(file))
    links, top = Links.of(cluster), len(cluster.levels)
    expected = formulas.ring_allreduce_time(cluster.workers, SIZE, *links.allreduce(top, 0))
    message = formulas.transfer_time(SIZE, *links.sendrecv(top, 0))
    table = Table(title=f"{name}: levels {'found' if right(case, cluster) else 'NOT found'}, {took:.0f} s", box=None)
    for heading in ("level", "joins", "set, Mbit/s", "link", "message", "all-reduce", "cards, Mbit/s"):
        table.add_column(heading, justify="left" if heading == "level" else "right")
    for row in rows(case, cluster):
        table.add_row(*row)
    table.add_row("predicted / measured", "", "", "", f"{message / sent:.3f}", f"{expected / reduced:.3f}", "")
    Console(width=110).print(table)


def _mbit(rate: float) -> str:
    return f"{rate / MBIT:.0f}" if rate < float("inf") else "-"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--runs", type=int, default=1)
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in CASES]:
        parser.error(f"there is no network {unknown[0]!r}")
    if os.environ.get(INSIDE):
        measure(given.names[0], given.runs)
        return 0
    return max(
        in_own_network([name, "--runs", str(run)]) for name in given.names or CASES for run in range(1, given.runs + 1)
    )


if __name__ == "__main__":
    sys.exit(main())
