"""The sound files that are damaged: profiles, clusters, devices, graph.txt, plan and run folders. All small."""

from __future__ import annotations

import itertools
import json
import random
import tomllib
from pathlib import Path
from typing import Any

import runs
from drive import call
from manifests import write_manifest
from repository import ROOT

from pipeplan.cluster_data.devices import bundled_device_names
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.cluster_data.machine_costs import IdleCores, MachineCosts
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan_launch.checkpoint.manifest import Position, SavedTensor


def profile(rng: random.Random) -> dict[str, Any]:
    """A chain or a small DAG."""
    if rng.random() < 0.5:
        layers = (Layer("a", 1.0, 2.0, 100, 10), Layer("b", 0.5, 1.0, 0, 4), Layer("c", 0.25, 0.5, 4 << 20, 6))
        tensors = (Tensor("x", "a", ("b",), 8, 8), Tensor("y", "b", ("c",), 4 << 10, 4))
    else:
        layers = tuple(
            Layer(name, 0.01 * number, 0.02, 1 << 18 + number, 1 << 24, buffer_bytes=64)
            for number, name in enumerate(("in", "left", "right", "join", "out"), start=1)
        )
        tensors = (
            Tensor("x", "in", ("left", "right", "join"), 1 << 16, 1 << 16),
            Tensor("l", "left", ("join",), 1 << 12, 0),
            Tensor("r", "right", ("join",), 1 << 12, 1 << 12),
            Tensor("j", "join", ("out",), 64, 64),
        )
    together = rng.choice([(), (), ((layers[0].name, layers[1].name),)])
    return Profile(layers, tensors, minibatch=8, model_name="small", together=together).to_json()


def cluster(rng: random.Random) -> dict[str, Any]:
    """Equal servers, or servers that differ."""
    device = {"name": "V100", "kind": "cuda", "memory": rng.choice(["16 GiB", 64 << 20]), "speed": 1.0}
    top = {"name": "cluster", "count": 2, "bandwidth": "10 Gbit/s", "latency": "50 us", "allreduce_efficiency": 0.6}
    document: dict[str, Any] = {"format": "pipeplan-cluster", "version": 1, "name": "lab"}
    if rng.random() < 0.6:
        inner = {"name": "server", "count": 2, "bandwidth": "12 GB/s", "source": "measured"}
        return document | {"device": device, "level": [inner, top]}
    servers = [
        {"device": "V100", "devices": 2, "bandwidth": "12 GB/s"},
        {"device": "slow", "devices": 1, "count": 1, "card": "1 Gbit/s", "price_per_hour": 1.5},
    ]
    slow = device | {"name": "slow", "speed": 0.5, "memory": "8 GiB"}
    return document | {"device": [device, slow], "server": servers, "level": [top]}


def graph(rng: random.Random) -> str:
    """A graph.txt as PipeDream's profiler writes it."""
    nodes = [
        f"node{number} -- {what} -- forward_compute_time={rng.randint(1, 90) / 10}, backward_compute_time=2.500, "
        f"activation_size={'[5.0; 6.0]' if number == 3 else '1024.0'}, parameter_size=4096.000"
        for number, what in enumerate(("Input0", "Conv2d(3, 4)", "ReLU(inplace)", "__getitem__(0)", "Linear"), start=1)
    ]
    return "\n".join([*nodes, "\tnode1 -- node2", "\tnode2 -- node3", "\tnode3 -- node4", "\tnode3 -- node5", ""])


def device(rng: random.Random) -> dict[str, Any]:
    """A bundled device."""
    path = ROOT / "profiles" / "devices" / f"{rng.choice(bundled_device_names())}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def executor_costs(rng: random.Random) -> dict[str, Any]:
    """What the executor costs on this machine."""
    throughput = {count: count * rng.uniform(0.4, 1.0) for count in range(1, rng.randint(2, 5))}
    costs = ExecutorCosts(1e-4, 5e-5, 1e-10, 2e-10, source="measured")
    idle = IdleCores(len(throughput), rng.random(), 1e-3) if rng.random() < 0.5 else None
    return MachineCosts(costs, throughput, "2026-01-01T00:00:00Z", alone_pass_s=5e-5, idle=idle).to_json()


def run_folder(plan: Path, rng: random.Random) -> Path:
    """A run of a plan folder, with a summary, a timeline and metrics of every worker."""
    pipeline = json.loads((plan / "stages" / "stage-0.json").read_text(encoding="utf-8"))["pipeline"]
    times = {name: rng.uniform(0.1, 2.0) for name in (*runs.NAMES, *runs.OWN)}
    summary = runs.summary_of(plan, 4.0, [times] * len(pipeline), minibatch=4, emulated=False, cause=None)
    folder = runs.write_run(plan, "20260131T120000Z", summary)
    for name in ("timeline", "metrics"):
        (folder / name).mkdir()
    for stage, entry in enumerate(pipeline):
        for replica, rank in enumerate(entry["workers"]):
            _recorded(folder, summary["plan"], rank, stage, replica, len(entry["workers"]))
    return folder


def _recorded(folder: Path, plan: str, rank: int, stage: int, replica: int, replicas: int) -> None:
    intervals: list[Any] = []
    lines = []
    for number in range(replica, 12, replicas):
        start = float(number + stage)
        intervals += [["forward", number, start, start + 0.5], ["wait", number, start + 0.5, start + 0.75]]
        intervals += [["backward", number, start + 0.75, start + 1.5], ["update", number, start + 1.5, start + 1.75]]
        place = {"rank": rank, "stage": stage, "replica": replica, "epoch": 0, "minibatch": number}
        lines.append(json.dumps(place | {"sync_s": 0.125, "loss": 0.5, "time_s": 1e9 + start}))
    head = {"format": "pipeplan-timeline", "version": 1, "plan": plan, "rank": rank, "stage": stage, "replica": replica}
    head |= {"epoch": 0, "epoch_minibatches": 12, "first": 0, "minibatches": 12, "intervals": intervals}
    (folder / "timeline" / f"rank-{rank}.json").write_text(json.dumps(head))
    (folder / "metrics" / f"rank-{rank}.jsonl").write_text("\n".join([*lines, ""]))


def checkpoint(run: Path, rng: random.Random) -> Path:
    """A complete checkpoint in a run folder, with a manifest that is as it should be."""
    position = Position(rng.randint(0, 3), rng.randint(0, 12), 12)
    folder = run / "checkpoints" / f"epoch-{position.epoch + 1:04d}-sample-{4 * position.minibatch:08d}"
    folder.mkdir(parents=True)
    (folder / "tensors-0.safetensors").write_bytes(bytes(256))
    tensors = {
        f"model.{name}.weight": SavedTensor("float32", (4, 4), "tensors-0.safetensors", 0)
        for index, name in enumerate("ab")
    }
    write_manifest(folder, position, files={"tensors-0.safetensors": 256}, tensors=tensors)
    return folder


PLANNED = (
    [],
    ["--inference", "--stages", "2"],
    ["--schedule", "gpipe", "--batch", "32"],
    ["--schedule", "2bw", "--batch", "64"],
    ["--schedule", "vertical-sync", "--stages", "2"],
)


def plan_folders() -> list[Path]:
    """Plan folders in this folder: several stages with replicas, inference, other schedules."""
    made = []
    profiles = {
        "unequal": (Layer("a", 1.0, 2.0, 100, 10), Layer("b", 1.5, 3.0, 10**10, 4)),
        "copied": tuple(Layer(name, 0.1, 0.2, 10**8, 10) for name in "abcd"),
    }
    for name, layers in profiles.items():
        pairs = itertools.pairwise(layers)
        tensors = tuple(Tensor(one.name, one.name, (two.name,), 10**6, 10**6) for one, two in pairs)
        Profile(layers, tensors, minibatch=4, model_name=name).save(Path(f"{name}.json"))
        for options in PLANNED:
            folder = Path(name + "-".join(options).replace("-", ""))
            arguments = ["solve", f"{name}.json", "--cluster", "A", "--servers", "2", "--ignore-memory"]
            quick = ["--solver", "dp"]
            ended = call([*arguments, *quick, *options, "-o", str(folder)])
            assert ended.code == 0, ended
            made.append(folder)
    return made
