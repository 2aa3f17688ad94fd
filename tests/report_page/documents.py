"""Documents as `pipeplan report` embeds them, made up: every kind of plan that the page must show, and hostile names."""

from __future__ import annotations

import json
from typing import Any

from pipelines import Shape, intervals

Document = dict[str, Any]
GIB = 2**30
HOSTILE = '<img src=x onerror="window.hit=1"></script><script>window.hit=1</script>{{7*7}}'
LAYERS = ("conv", "relu", "conv", "relu", "pool")


def document(
    replicas: tuple[int, ...] = (15, 1),
    *,
    layers: int = 39,
    per_server: int = 4,
    run: bool = False,
    inference: bool = False,
    graph: bool = True,
    minibatches: int = 64,
    lanes: int = 64,
    title: str = "vgg16 as 15-1 on cluster A",
    name: str = "",
) -> Document:
    """A document of a plan with so many replicas in each stage, in the order of the cluster's workers.

    `lanes` is how many workers the timeline has; `name` goes into every text that a user's files could hold.
    """
    shape = Shape.of(replicas, inference=inference)
    workers = sum(replicas)
    pace = shape.pace_s
    lane_count = min(lanes, workers)
    predicted = intervals(shape, minibatches, lane_count)
    measured = intervals(shape.slower(1.12), minibatches, lane_count) if run else None
    end = max((measured or predicted)["end_s"])
    return {
        "title": title + name,
        "version": "0.1.0",
        "made": {
            "profile": "vgg16" + name,
            "minibatch": 64,
            "kind": "modelled",
            "how": "estimated for a V100 from its datasheet" + name,
            "cluster": f"cluster A{name}: {-(-workers // per_server)} servers × {per_server} V100 16 GB",
        },
        "plan": {
            "config": "-".join(map(str, replicas)),
            "mode": "inference" if inference else "training",
            "schedule": "forward-only" if inference else "1f1b-stashing",
            "copies": 1,
        },
        "prediction": {
            "minibatch_s": pace,
            "minibatches_per_s": 1 / pace,
            "samples_per_s": 64 / pace,
            "bound_by": "compute of stage 1",
            "bounds": _bounds(shape, name),
        },
        "measured": _measured(shape) if run else None,
        "stages": _stages(shape, layers, per_server),
        "graph": _graph(layers, len(replicas), name) if graph else None,
        "placement": _placement(replicas, per_server),
        "timeline": {
            "lanes": [
                {"worker": worker, "stage": shape.stage_of(worker), "server": worker // per_server}
                for worker in range(lane_count)
            ],
            "end_s": end,
            "steady": [0.25 * end, 0.8 * end],
            "predicted": predicted,
            "measured": measured,
            "omitted": f"{workers - lane_count} workers are left out." if lane_count < workers else "",
        },
        "links": _links(workers // per_server, run, name),
        "memory": [_memory(shape, stage, end, run) for stage in range(len(replicas))],
        "comparisons": _comparisons(pace, name),
        "scaling": _scaling(pace, workers),
        "certificate": {
            "proven": True,
            "sentences": [
                f"No plan of this model on this cluster can complete a minibatch in less than {pace * 1e3:.3g} ms.",
                "The dynamic program and the integer program found the same pace, independently of each other.",
                "`pipeplan check` verifies this from plan.json without either." + name,
            ],
        },
    }


def _bounds(shape: Shape, name: str) -> list[Document]:
    pace = shape.pace_s
    found = []
    for index in range(shape.stages):
        found.append((f"compute of stage {index + 1}", shape.compute_s(index) / shape.replicas[index]))
        if shape.replicas[index] > 1:
            found.append((f"synchronisation of stage {index + 1}", 0.28 * pace))
        if index:
            found.append((f"boundary between stages {index} and {index + 1}{name}", 0.25 * pace / index))
    found.append((f"network card of server 1{name}", 0.41 * pace))
    found.sort(key=lambda one: -one[1])
    return [{"what": what, "seconds": seconds, "share": seconds / pace} for what, seconds in found]


def _measured(shape: Shape) -> Document:
    return {
        "minibatch_s": 1.12 * shape.pace_s,
        "ratio": 1.12,
        "cause": "Stage 1 computes 12% longer than predicted: its backward pass takes 15.1 ms instead of 13.3 ms.",
        "stages": [
            {
                "forward_s": {"predicted": shape.forward_s[index], "measured": 1.1 * shape.forward_s[index]},
                "backward_s": {"predicted": shape.backward_s[index], "measured": 1.13 * shape.backward_s[index]},
                "sync_s": {"predicted": 0.006, "measured": 0.0071},
                "wait_s": {"predicted": None, "measured": 0.0012},
                "memory_bytes": {"predicted": 6 * GIB, "measured": 6.6 * GIB},
            }
            for index in range(shape.stages)
        ],
    }


def _stages(shape: Shape, layers: int, per_server: int) -> list[Document]:
    found, first = [], 0
    for index, count in enumerate(shape.replicas):
        last = layers - 1 if index == shape.stages - 1 else (index + 1) * layers // shape.stages - 1
        start = sum(shape.replicas[:index])
        parts = [["weights", 0.9 * GIB], ["gradients", 0.5 * GIB], ["optimiser", 0.5 * GIB], ["activations", 3.1 * GIB]]
        found.append(
            {
                "index": index,
                "layers": last - first + 1,
                "first": f"features.{first}",
                "last": f"features.{last}",
                "workers": list(range(start, start + count)),
                "servers": f"{start // per_server}-{(start + count - 1) // per_server}",
                "depth": shape.depth(index),
                "versions": shape.depth(index),
                "recompute": index == 1,
                "forward_s": shape.forward_s[index],
                "backward_s": shape.backward_s[index],
                "update_s": 0.0004,
                "sync_s": 0.006 if count > 1 else 0.0,
                "send_bytes": 6.12 * 2**20 if index < shape.stages - 1 else 0,
                "memory_bytes": sum(size for _, size in parts),
                "capacity_bytes": 16 * GIB,
                "memory_parts": parts,
            }
        )
        first = last + 1
    return found


def _graph(layers: int, stages: int, name: str) -> Document:
    """A chain with a layer beside every tenth, whose outputs meet again."""
    nodes: Document = {key: [] for key in ("name", "op", "stage", "x", "y")}
    nodes |= {key: [] for key in ("forward_s", "backward_s", "parameter_bytes", "output_bytes")}
    edges, rank = [], 0
    for number in range(layers):
        beside = number % 10 == 5
        nodes["name"].append(f"features.{number}{name}")
        nodes["op"].append(LAYERS[number % len(LAYERS)])
        nodes["stage"].append(min(stages - 1, number * stages // layers))
        nodes["x"].append(1 if beside else 0)
        nodes["y"].append(rank)
        nodes["forward_s"].append(0.0001 * (1 + number % 7))
        nodes["backward_s"].append(0.0002 * (1 + number % 7))
        nodes["parameter_bytes"].append((number % 5 == 0) * 2**20 * (1 + number % 9))
        nodes["output_bytes"].append(2**20 * (1 + number % 4))
        if number:
            edges.append([number - 1 - (number % 10 == 6), number])
        if number % 10 == 6:
            edges.append([number - 1, number + 1 if number + 1 < layers else number])
        if number % 10 == 5:
            edges.append([number - 1, number + 1 if number + 1 < layers else number])
        rank += 1
    edges = sorted({(a, b) for a, b in edges if a < b})
    return {"width": 2, "height": rank, "nodes": nodes, "edges": [list(edge) for edge in edges], "note": ""}


def _placement(replicas: tuple[int, ...], per_server: int) -> list[Document]:
    home = [stage for stage, count in enumerate(replicas) for _ in range(count)]
    home += [-1] * (-len(home) % per_server)
    return [
        {"server": start // per_server, "workers": [[start + i, home[start + i]] for i in range(per_server)]}
        for start in range(0, len(home), per_server)
    ]


def _links(servers: int, run: bool, name: str) -> list[Document]:
    rate = 1.25e9
    return [
        {
            "name": f"server {server}, {way}{name}",
            "rate": rate,
            "busy": share,
            "bytes_per_minibatch": share * 0.02 * rate,
            "measured_busy": share * 1.1 if run else None,
        }
        for server in range(servers)
        for way, share in (("out", 0.1 + 0.6 / (1 + server)), ("in", 0.05 + 0.4 / (1 + server)))
    ]


def _memory(shape: Shape, stage: int, end_s: float, run: bool) -> Document:
    def steps(factor: float) -> Document:
        depth = shape.depth(stage)
        times = [end_s * number / 40 for number in range(41)]
        held = [min(number, depth) - (number > depth) * (number % 2) for number in range(40)] + [0]
        return {"t": times, "bytes": [round((2 + 3 * count / depth) * factor * GIB) for count in held]}

    return {
        "stage": stage,
        "worker": sum(shape.replicas[:stage]),
        "capacity_bytes": 16 * GIB,
        "predicted": steps(1.0),
        "measured": steps(1.1) if run else None,
    }


def _comparisons(pace: float, name: str) -> list[Document]:
    rows = (
        ("this plan", "15-1", 1.0, ""),
        ("runner-up", "14-2", 1.07, "the best plan with other replica counts" + name),
        ("data parallelism", "16", 2.59, ""),
        ("best straight pipeline", "1-1-1-1-1-1-1", 6.84, ""),
        ("model parallelism", "1-1-1-1-1-1-1", 42.92, "the same stages, not pipelined"),
        ("single worker", "1", None, "does not fit in memory"),
    )
    return [
        {"name": what, "config": config, "minibatch_s": gain and gain * pace, "gain": gain, "remark": remark}
        for what, config, gain, remark in rows
    ]


def _scaling(pace: float, workers: int) -> Document:
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if count <= workers]
    return {
        "unit": "workers",
        "points": [
            {
                "workers": count,
                "minibatch_s": pace * (workers / count) ** 0.93,
                "config": f"{count - 1}-1" if count > 1 else "1",
                "data_parallelism_s": pace * 2.59 * (workers / count) ** 0.45,
            }
            for count in counts
        ],
    }


def big() -> Document:
    """1,000 layers on 1,024 workers in 64 stages."""
    return document((16,) * 64, layers=1000, per_server=8, minibatches=96, lanes=128, title="big as 16-…-16 on cluster Z")


KINDS = {
    "plan": lambda: document(),
    "run": lambda: document((2, 1, 1), run=True, minibatches=24, title="translate as 2-1-1 on lab"),
    "inference": lambda: document((3, 1), inference=True, minibatches=24, title="vgg16, inference, as 3-1 on lab"),
    "no-profile": lambda: document((2, 2), graph=False, minibatches=16, title="vgg16 as 2-2 on lab"),
    "one-stage": lambda: document((8,), minibatches=32, title="vgg16 as 8 on lab"),
    "many-stages": lambda: document((1,) * 16, layers=160, minibatches=40, title="gnmt16 as 1-…-1 on cluster A"),
    "hostile": lambda: document((2, 1), name=HOSTILE, minibatches=8, run=True),
    "big": big,
}


def text(found: Document) -> str:
    """As it stands in the page: nothing in it can end the script element."""
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
