"""Which worker every process becomes: against all permutations, and what is meant to stay as it is."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.rank_mapping.host_identity import (
    SERVER_VARIABLE,
    Location,
    location_json,
    locations_json,
    own_location,
    read_locations,
)
from pipeplan_launch.rank_mapping.rank_assignment import (
    Path,
    RankAssignment,
    assign_workers,
    devices_by_name,
    server_of_workers,
)


def composition(draw: random.Random, total: int) -> list[int]:
    """Random parts of a number, in random order."""
    parts = []
    while total:
        parts.append(draw.randint(1, total))
        total -= parts[-1]
    return parts


def pieces(sizes: Sequence[int], hosts: Sequence[object], workers: Sequence[int]) -> int:
    """How many pairs of a planned and a real server have workers in common."""
    meant = [number for number, size in enumerate(sizes) for _ in range(size)]
    return len({(meant[worker], host) for worker, host in zip(workers, hosts, strict=True)})


def drawn(draw: random.Random) -> tuple[list[int], list[Path]]:
    """Servers of the plan, and processes scattered over machines, containers and launchers."""
    count, hosts = draw.randint(1, 6), draw.randint(1, 4)
    nested = draw.random() < 0.5
    paths: list[Path] = []
    for _ in range(count):
        host = draw.randrange(hosts)
        paths.append((host // 2 if nested else host, host, draw.randrange(2)))
    return composition(draw, count), paths


def test_the_hosts_of_a_fault_are_named() -> None:
    hosts = ["alpha", "alpha", "beta", "gamma"]
    locations = [Location("m", host, "n", str(number)) for number, host in enumerate(hosts)]
    found = RankAssignment.of([2, 1, 1], locations)
    assert found.hosts_text(0, [2]) == " (rank 0 is on alpha, rank 2 on beta)"
    assert found.hosts_text(2, [0, 3]) == " (rank 2 is on beta, rank 0 on alpha and rank 3 on gamma)"
    assert found.hosts_text(0) == " (rank 0 is on alpha, the others are on beta and gamma)"
    assert found.hosts_text(0, [1]) == " (on alpha)"
    assert RankAssignment.of([2], locations[:2]).hosts_text(0, [1]) == ""


def test_nearly_as_few_pieces_as_any_order_has() -> None:
    draw, beyond = random.Random(11), 0
    for _ in range(150):
        sizes, paths = drawn(draw)
        hosts = [path[:2] for path in paths]
        workers = assign_workers(sizes, paths)
        assert sorted(workers) == list(range(len(paths)))
        fewest = min(pieces(sizes, hosts, order) for order in itertools.permutations(range(len(paths))))
        excess = pieces(sizes, hosts, workers) - fewest
        assert excess <= 1, (sizes, paths)
        beyond += excess
    assert beyond <= 3


def test_nothing_changes_where_the_natural_order_is_as_good() -> None:
    draw = random.Random(12)
    kept = 0
    for _ in range(300):
        sizes, paths = drawn(draw)
        natural, workers = tuple(range(len(paths))), assign_workers(sizes, paths)
        if workers != natural:
            depths = [pieces(sizes, [path[:depth] for path in paths], workers) for depth in (2, 1, 3)]
            assert depths < [pieces(sizes, [path[:depth] for path in paths], natural) for depth in (2, 1, 3)]
        kept += workers == natural
    assert kept > 100


def test_places() -> None:
    for sizes, hosts, expected in (
        ((4, 4), "AAAABBBB", (0, 1, 2, 3, 4, 5, 6, 7)),
        ((4, 4), "BBBBAAAA", (0, 1, 2, 3, 4, 5, 6, 7)),  # equal servers: the numbers of launchers decide
        ((2, 1), "ABB", (2, 0, 1)),  # sizes decide
        ((4, 2, 2), "AABBBBCC", (4, 5, 0, 1, 2, 3, 6, 7)),
        ((2, 2), "ABAB", (0, 2, 1, 3)),  # cyclic
        ((2, 2, 2), "ABCABC", (0, 4, 2, 1, 5, 3)),  # A, C, B: three processes stay on their server
        ((2, 2), "AAAA", (0, 1, 2, 3)),  # all on one
        ((4,), "ABAB", (0, 1, 2, 3)),  # one server on two: no order is better
        ((2, 2, 2, 2), "AAAABBBB", (0, 1, 2, 3, 4, 5, 6, 7)),  # two on each
        ((3, 1, 2, 2), "ABABABAB", (0, 4, 1, 5, 2, 6, 3, 7)),
    ):
        assert assign_workers(sizes, [(host, host, host) for host in hosts]) == expected


def test_containers_of_a_machine_hold_one_server_where_none_holds_it_alone() -> None:
    """Pods of four on machines of eight, in turn: servers of eight go to both pods of a machine."""
    pods = [(f"machine {pod % 2}", f"pod {pod}", "") for pod in range(4) for _ in range(4)]
    workers = assign_workers([8, 8], pods)
    meant = server_of_workers([8, 8])
    assert len({(meant[worker], pod[0]) for worker, pod in zip(workers, pods, strict=True)}) == 2


def test_many_servers_are_packed_in_few_pieces() -> None:
    """Small servers fill large ones, whatever their order."""
    draw = random.Random(13)
    for _ in range(20):
        rooms = [draw.choice([6, 8]) for _ in range(12)]
        sizes = [part for size in rooms for part in draw.choice([(size // 2, size // 2), (size - 2, 1, 1)])]
        draw.shuffle(sizes)
        hosts = [number for number, room in enumerate(rooms) for _ in range(room)]
        workers = assign_workers(sizes, [(host, host, host) for host in hosts])
        assert sorted(workers) == list(range(len(hosts)))
        assert pieces(sizes, hosts, workers) <= len(sizes) + 4


def test_what_processes_say_comes_through_the_store() -> None:
    said = [Location("boot", f"host {number // 3}", "net", str(number // 3), 4, "0,1") for number in range(7)]
    text = locations_json([location_json(one) for one in said])
    assert read_locations(text.encode()) == tuple(said)


def test_a_process_finds_out_where_it_is() -> None:
    mine = own_location({"GROUP_RANK": "3", "CUDA_VISIBLE_DEVICES": "4,5"}, ["u", "v"])
    assert mine.cards == "u v"
    assert own_location({}, ["u", ""]).cards == ""
    assert (mine.launcher, mine.devices, mine.visible) == ("3", 2, "4,5")
    assert own_location({}).server == mine.server
    assert own_location({SERVER_VARIABLE: "a"}).server == own_location({SERVER_VARIABLE: "a"}).server != mine.server


def on(hosts: str, devices: int = 0, **more: str) -> list[Location]:
    return [Location(host, host, "", devices=devices, **more) for host in hosts]


def test_devices_are_taken_in_turn_by_those_who_see_the_same() -> None:
    assignment = RankAssignment.of([2, 2], on("ABAB", devices=2))
    assert [assignment.device(process) for process in range(4)] == [0, 0, 1, 1]
    assert assignment.own_device_each()
    assert not RankAssignment.of([3], on("AAA", devices=2)).own_device_each()
    one_each = [Location("A", "A", "", devices=1, visible=text) for text in "01"]
    assert [RankAssignment.of([2], one_each).device(process) for process in range(2)] == [0, 0]
    assert RankAssignment.of([2], one_each).own_device_each()


def test_workers_take_the_devices_that_the_plan_names() -> None:
    names = ["NVIDIA GeForce RTX 4060 Ti", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4060"]
    assert devices_by_name(["RTX 4090", "RTX 4060", "rtx 4060 ti"], names) == [1, 2, 0]
    assert devices_by_name(["RTX 4060", "RTX 4060"], names) == [2, 0]
    assert devices_by_name([names[1], names[0]], names[:2]) == [1, 0]
    assignment = RankAssignment.of([2, 2], on("ABAB", devices=2))
    planned = ["RTX 4090", "RTX 4060 Ti", "RTX 4060 Ti", "RTX 4090"]
    found = [assignment.device(process, planned, names[:2]) for process in range(4)]
    assert [planned[assignment.workers[process]] in names[number] for process, number in enumerate(found)] == [True] * 4
    for wanted, there in ((["RTX 3090"], names), (["RTX 4090", "RTX 4090"], names), (["RTX 4090"], names[:1])):
        with pytest.raises(LaunchError, match="name the devices in the cluster file as torch does"):
            devices_by_name(wanted, there)


def test_seats_know_who_is_apart_and_what_servers_are_called() -> None:
    assignment = RankAssignment.of([2, 2], on("ABBB"))
    assert assignment.divided_servers == ((0, 1),)
    assert not assignment.is_one_server
    assert [assignment.name(server) for server in (0, 1)] == ["A", "B"]
    assert assignment.started() == "1 on A and 3 on B"
    twins = RankAssignment.of([1, 1], [Location("boot 1", "node", ""), Location("boot 2", "node", "")])
    assert [twins.name(server) for server in (0, 1)] == ["node (1)", "node (2)"]
    assert RankAssignment.of([2, 1], on("AAA")).is_one_server


def pods(cards: Sequence[str], networks: str) -> RankAssignment:
    """A worker each, on machines that their user says are one server; numbers of devices begin at 0 in each."""
    locations = [
        Location("boot", f"pod {number}", network, devices=1, cards=card, named="node")
        for number, (card, network) in enumerate(zip(cards, networks, strict=True))
    ]
    return RankAssignment.of([len(locations)], locations)


def test_pods_that_count_as_one_server_have_networks_of_their_own() -> None:
    """The loopback interface of one is not that of another."""
    apart = pods(["", ""], "AB")
    assert (apart.is_one_server, apart.is_one_network, apart.started()) == (True, False, "2 on node")
    assert pods(["", ""], "AA").is_one_network


def test_a_device_is_known_by_its_uuid_whatever_its_number_and_container() -> None:
    assert pods(["u", "v"], "AB").own_device_each()
    assert pods(["", ""], "AB").own_device_each(), "a container has devices of its own, as far as is known"
    assert not pods(["u", "u"], "AB").own_device_each(), "time-slicing"
    both = [Location("boot", f"pod {number}", "", devices=2, cards="u v") for number in range(2)]
    assignment = RankAssignment.of([1, 1], both)
    assert [assignment.device(process) for process in range(2)] == [0, 1]
    assert assignment.own_device_each()
    # A step of SLURM that shows every task its own one, as number 0.
    tasks = [Location("boot", "node", "", devices=1, visible="0", cards=card) for card in "uv"]
    assert RankAssignment.of([2], tasks).own_device_each()
