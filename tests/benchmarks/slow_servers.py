"""Whether `pipeplan doctor --servers` names what makes two servers slow, where it is known.

    PYTHONPATH=tests/support python tests/benchmarks/slow_servers.py [NAME …]

Two servers are namespaces on this machine with a shaped cable between them, and one worker each. The model is the
bundled VGG-16 on V100, with times divided so that a rate here stands for a larger one: a cable of 100 Mbit/s with times
ten times as long is one of 1 Gbit/s.

    1, 10, 25 Gbit/s    the same cable in both directions; one worker a server hides its exchange at 25
    one direction       10 Gbit/s one way, 1 Gbit/s the other
    one server          100 Gbit/s, and one server whose processor is also used by others
    loader              100 Gbit/s, and a loader that takes longer than the passes
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from network_namespaces import Network, NetworkNode, slow_down
from peers_run import INSIDE, in_own_network
from rich.console import Console
from rich.table import Table

from pipeplan import cli, read_profile
from pipeplan.cli.commands import doctor as _command  # noqa: F401  imported before the workers are forked
from pipeplan.explanation.slow_servers import DIRECTION, LINK, LOADER, SLOW_SERVER
from pipeplan.profile_data.profile import Profile
from pipeplan_measure import links as _measured  # noqa: F401

NONE = "none"
SCALE = 20.0
"""By how much rates here are lower, and times longer, than those they stand for."""


@dataclass(frozen=True)
class Case:
    """Two servers, and the cause that should be named."""

    gbit_s: float
    expected: str
    back_gbit_s: float = 0.0
    """The other direction, where it differs."""
    busy: bool = False
    """Whether others use the processor of the second server."""
    read_s: float = 0.0


CASES = {
    "1 Gbit/s": Case(1, LINK),
    "10 Gbit/s": Case(10, LINK),
    "25 Gbit/s": Case(25, NONE),
    "one direction": Case(10, DIRECTION, back_gbit_s=1),
    "one server": Case(100, SLOW_SERVER, busy=True),
    "loader": Case(100, LOADER, read_s=0.5),
}


def scaled_profile(read_s: float) -> Profile:
    """The model with longer times."""
    profile = read_profile("vgg16-v100")
    names = ("forward_s", "backward_s", "update_s")
    layers = tuple(replace(layer, **{name: SCALE * getattr(layer, name) for name in names}) for layer in profile.layers)
    return replace(profile, layers=layers, sizes=(), read_s=read_s)


def measured(name: str, folder: Path, port: int) -> dict[str, object]:
    """What the command prints for a case."""
    case = CASES[name]
    scaled_profile(case.read_s * SCALE).save(folder / "profile.json")
    rate = f"{case.gbit_s * 1000 / SCALE:g}mbit"
    network = Network(NetworkNode("", 0, (NetworkNode(rate, 1), NetworkNode(rate, 1))))
    if case.back_gbit_s:
        slow_down(network, 1, f"{case.back_gbit_s * 1000 / SCALE:g}mbit")

    def work() -> None:
        rank = int(os.environ.pop("RANK"))
        os.environ["NODE_RANK"], servers = str(rank), os.environ.pop("WORLD_SIZE")
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
        if case.busy and rank == 1:
            for _ in range(2):
                multiprocessing.get_context("fork").Process(target=_burn, daemon=True).start()
        sys.stdout = (folder / f"{rank}.json").open("w")
        words = ["--servers", servers, "--workers", "1", "--profile", str(folder / "profile.json"), "--json"]
        sys.argv = ["pipeplan", "doctor", *words]
        cli.main()

    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid, _ in network.start(work, port)]
    if any(statuses):
        raise RuntimeError(f"pipeplan doctor ended with {statuses}")
    found: dict[str, object] = json.loads((folder / "0.json").read_text())
    return found


def _burn() -> None:
    while True:
        pass


def show(name: str, port: int) -> bool:
    """Print a row for a case; returns whether the cause was named rightly."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        found = measured(name, Path(folder), port)
    causes = found["causes"]
    assert isinstance(causes, list)
    named = causes[0]["kind"] if causes else NONE
    table = Table(box=None, show_header=False)
    per_s = [found["one_per_s"], found["all_per_s"]]
    one, both = (f"{SCALE * value:.0f}" if isinstance(value, float) else "-" for value in per_s)
    right = "right" if named == case.expected else f"WRONG, expected {case.expected}"
    table.add_row(
        f"{name}:",
        f"one server {one}, both {both} samples/s;",
        f"{named} ({right})",
        causes[0]["text"] if causes else "",
    )
    Console(width=150).print(table)
    return named == case.expected


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(CASES))
    names = parser.parse_args().names or list(CASES)
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"there is no case {unknown[0]!r}")
    if os.environ.get(INSIDE):
        return 0 if show(names[0], 29500) else 1
    return max(in_own_network([name]) for name in names)


if __name__ == "__main__":
    sys.exit(main())
