"""Objects made with whole numbers equal those that are read back from their files, digests included."""

from __future__ import annotations

import json
from dataclasses import is_dataclass
from pathlib import Path
from typing import get_type_hints

import numpy as np
import pytest

from pipeplan.cluster_data import cluster as cluster_records
from pipeplan.cluster_data.cluster import Cluster, Device, Level, Server
from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.problem.options import Options
from pipeplan.profile_data import layers as profile_records
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.util.files import Node


def _cluster(number: type) -> Cluster:
    """A cluster of two servers whose figures are all of one type."""
    device = Device("d", "cuda", number(16_000_000_000), number(1))
    inside = Level("server", 2, number(12_000_000_000), number(0), number(1), number(1))
    return Cluster("lab", device, (inside, Level("cluster", number(2), number(10**9))), (), number(3))


def _profile(number: type) -> Profile:
    """A profile of two layers whose figures are all of one type."""
    layers = [Layer(name, number(1), number(2), number(4), number(8), "", "", number(0), number(0)) for name in "ab"]
    tensor = Tensor("x", "a", ("b",), number(4), number(4))
    return Profile(tuple(layers), (tensor,), number(4), optimizer_state_ratio=number(1), whole_forward_s=number(2))


@pytest.mark.parametrize("number", [int, float, np.int64, np.float32])
def test_clusters_and_profiles_keep_their_digests_when_they_are_read_back(number: type, tmp_path: Path) -> None:
    machines = [
        Server(Device("d", "cuda", number(2**30)), Level("server", count, number(10**9)), number(10**8), number(2))
        for count in (1, 2)
    ]
    mixed = Cluster.of_servers("mixed", machines, [Level("cluster", 2, number(10**9))])
    for cluster in (_cluster(number), mixed):
        read = cluster_from_json(Node(json.loads(json.dumps(cluster.to_json())), "cluster"))
        assert (read, read.digest()) == (cluster, cluster.digest())
    assert _cluster(number).digest() == _cluster(float).digest()
    profile = _profile(number)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").digest() == profile.digest() == _profile(float).digest()


def test_a_number_that_is_not_whole_stays_where_an_integer_belongs() -> None:
    assert Device("d", "cpu", 1.5).memory_bytes == 1.5  # type: ignore[arg-type]
    assert isinstance(Options(overlap=1).overlap, float)


def test_every_record_with_a_number_settles_it() -> None:
    """A record that a later version adds to these modules must not be forgotten."""
    for module in (cluster_records, profile_records):
        for kind in vars(module).values():
            if not (isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__):
                continue
            if any("float" in str(hint) for hint in get_type_hints(kind).values()):
                assert "__post_init__" in vars(kind), kind
