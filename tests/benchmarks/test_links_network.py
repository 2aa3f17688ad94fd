"""The links of a network that is known, measured through real sockets: levels and rates are those that were set."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import network_namespaces as requirements
import pytest

from pipeplan.cluster_data import cluster_toml
from pipeplan.cluster_data.links import Links

SCRIPT = Path(__file__).with_name("links.py")
MBIT = 1.25e5

LACKS = requirements.missing_requirement()

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(LACKS), reason=LACKS)]


def measured(name: str, folder: Path) -> tuple[Links, str]:
    environment = os.environ | {"PYTHONPATH": str(Path(requirements.__file__).parent)}
    command = [sys.executable, SCRIPT, name, "--keep", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return Links.of(cluster_toml.load_cluster(str(folder / f"{name}.toml"))), done.stdout


def test_two_servers_of_two(tmp_path: Path) -> None:
    links, said = measured("two-by-two", tmp_path)
    cluster = links.cluster
    assert [(level.name, level.count) for level in cluster.levels] == [("server", 2), ("cluster", 2)]
    assert cluster.levels[1].bandwidth == pytest.approx(400 * MBIT, rel=0.1)
    assert links.sendrecv(2, 0)[0] == pytest.approx(400 * MBIT, rel=0.1)
    assert links.allreduce(2, 0)[0] == pytest.approx(400 * MBIT, rel=0.2)
    assert links.sendrecv(1, 0)[0] > 5 * 400 * MBIT, "by the loopback interface"
    assert "levels found" in said


def test_servers_of_unequal_size(tmp_path: Path) -> None:
    links, _ = measured("unequal", tmp_path)
    assert links.cluster.server_sizes == (3, 1)
    assert links.sendrecv(2, 0)[0] == pytest.approx(200 * MBIT, rel=0.1)
