"""Documents as `pipeplan report` embeds them, made up: every kind of plan that the page must show; hostile names."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

# A small model of 1F1B, for timelines that look like real ones.

FORWARD, BACKWARD, _, UPDATE, ALL_REDUCE = range(5)
Intervals = dict[str, list[float]]


@dataclass(frozen=True)
class Shape:
    """A pipeline: replicas, and seconds of a forward and of a backward pass, by stage."""

    replicas: tuple[int, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]

    @staticmethod
    def of(replicas: tuple[int, ...], *, inference: bool = False) -> Shape:
        forward = tuple(0.0066 * count * (1 - 0.13 * (index % 3)) for index, count in enumerate(replicas))
        return Shape(replicas, forward, tuple(0.0 if inference else 2 * one for one in forward))

    def slower(self, factor: float) -> Shape:
        return replace(
            self,
            forward_s=tuple(factor * one for one in self.forward_s),
            backward_s=tuple(factor * one for one in self.backward_s),
        )

    @property
    def stages(self) -> int:
        return len(self.replicas)

    def compute_s(self, stage: int) -> float:
        return self.forward_s[stage] + self.backward_s[stage]

    @property
    def step_time_s(self) -> float:
        return max(self.compute_s(stage) / count for stage, count in enumerate(self.replicas))

    def depth(self, stage: int) -> int:
        return -(-sum(self.replicas[stage:]) // self.replicas[stage])

    def stage_of(self, worker: int) -> int:
        return next(stage for stage in range(self.stages) if worker < sum(self.replicas[: stage + 1]))


def _stream(shape: Shape, stage: int, replica: int, minibatches: int) -> list[tuple[int, int]]:
    mine = range(replica, minibatches, shape.replicas[stage])
    if not shape.backward_s[stage]:
        return [(FORWARD, number) for number in mine]
    depth = shape.depth(stage)
    actions = [(FORWARD, number) for number in mine[:depth]]
    for position, number in enumerate(mine):
        actions += [(BACKWARD, number), (UPDATE, number)]
        actions += [(FORWARD, later) for later in mine[depth + position : depth + position + 1]]
    return actions


def intervals(shape: Shape, minibatches: int, lanes: int) -> Intervals:
    """Columns of all intervals of the first `lanes` workers, as the timeline of a report has them."""
    streams = {
        (stage, replica): _stream(shape, stage, replica, minibatches)
        for stage, count in enumerate(shape.replicas)
        for replica in range(count)
    }
    done: dict[tuple[int, int, int], float] = {}
    free: dict[tuple[int, int], float] = defaultdict(float)
    next_action = dict.fromkeys(streams, 0)
    found: Intervals = {key: [] for key in ("lane", "kind", "number", "start_s", "end_s")}

    def add(lane: int, kind: int, number: int, start: float, end: float) -> None:
        if lane < lanes and end > start:
            for key, value in zip(found, (lane, kind, number, round(start, 7), round(end, 7)), strict=True):
                found[key].append(value)

    moved = True
    while moved:
        moved = False
        for (stage, replica), stream in streams.items():
            lane = sum(shape.replicas[:stage]) + replica
            while next_action[stage, replica] < len(stream):
                kind, number = stream[next_action[stage, replica]]
                ready = _ready(shape, done, kind, number, stage)
                if ready is None:
                    break
                start = max(free[stage, replica], ready)
                end = start + {FORWARD: shape.forward_s[stage], BACKWARD: shape.backward_s[stage]}.get(kind, 0.0008)
                add(lane, kind, number, start, end)
                if kind == UPDATE and shape.replicas[stage] > 1:
                    add(lane, ALL_REDUCE, number, end, end + 0.6 * shape.forward_s[stage])
                done[kind, number, stage] = free[stage, replica] = end
                next_action[stage, replica] += 1
                moved = True
    return found


def _ready(shape: Shape, done: dict[tuple[int, int, int], float], kind: int, number: int, stage: int) -> float | None:
    """When what the action needs is there; None where it is not yet known."""
    if kind == UPDATE:
        return 0.0
    if kind == FORWARD:
        return 0.0 if stage == 0 else done.get((FORWARD, number, stage - 1))
    last = stage == shape.stages - 1
    return done.get((FORWARD, number, stage) if last else (BACKWARD, number, stage + 1))


Document = dict[str, Any]
GIB = 2**30
LAYERS = ("conv", "relu", "conv", "relu", "pool")


def drawn_stages(shape: Shape, layers: int, per_server: int) -> list[Document]:
    found, first = [], 0
    for index, count in enumerate(shape.replicas):
        last = layers - 1 if index == shape.stages - 1 else (index + 1) * layers // shape.stages - 1
        start = sum(shape.replicas[:index])
        depth = shape.depth(index)
        parts = [
            [f"weights, {depth} version{'s' * (depth > 1)}", GIB],
            ["gradients", GIB // 2],
            ["optimiser's state", GIB // 2],
            [f"activations of {depth} microbatches in flight", 3 * GIB],
        ]
        found.append(
            {
                "index": index,
                "layers": last - first + 1,
                "first": f"features.{first}",
                "last": f"features.{last}",
                "workers": list(range(start, start + count)),
                "servers": f"{start // per_server}-{(start + count - 1) // per_server}",
                "depth": depth,
                "versions": depth,
                "recompute": index == 1,
                "forward_s": shape.forward_s[index],
                "backward_s": shape.backward_s[index],
                "update_s": 0.0004,
                "sync_s": 0.006 if count > 1 else 0.0,
                "send_bytes": 6420000 if index < shape.stages - 1 else 0,
                "return_bytes": 6420000 if index < shape.stages - 1 else 0,
                "parameter_bytes": GIB // 2,
                "memory_bytes": sum(size for _, size in parts),
                "capacity_bytes": 16 * GIB,
                "memory_parts": parts,
            }
        )
        first = last + 1
    return found


def drawn_graph(layers: int, stages: int, name: str) -> Document:
    """Rows of twelve, a layer beside the sixth of each, and a long edge past that; lines go back from row to row."""
    columns = ("name", "op", "layers", "stage", "x", "y", "forward_s", "backward_s", "parameter_bytes", "output_bytes")
    nodes: Document = {key: [] for key in columns}
    edges: list[list[int]] = []
    bends: list[list[float]] = []
    width = 182 * min(layers, 12) - 32
    for number in range(layers):
        row, place = divmod(number, 12)
        values = (
            f"features.{number}{name}",
            LAYERS[number % len(LAYERS)],
            1 + number % 2,
            min(stages - 1, number * stages // layers),
            182 * place,
            130 * row + 52 * (place == 5),
            0.0001 * (1 + number % 7),
            0.0002 * (1 + number % 7),
            (number % 5 == 0) * 2**20 * (1 + number % 9),
            2**20 * (1 + number % 4),
        )
        for key, value in zip(columns, values, strict=True):
            nodes[key].append(value)
        if place == 6:
            bends.append([len(edges), 182 * 5, 130 * row + 17, 182 * 5 + 150, 130 * row + 17])
            edges.append([number - 2, number])
        if place == 0 and row:
            bends.append([len(edges), width + 16, 130 * row - 22, -16, 130 * row - 22])
        if number:
            edges.append([number - 1, number])
    height = 130 * -(-layers // 12) - 44
    return {
        "width": width,
        "height": height,
        "w": 150,
        "h": 34,
        "nodes": nodes,
        "edges": edges,
        "bends": bends,
        "note": "Some layers are drawn as one." + name,
    }


def drawn_placement(replicas: tuple[int, ...], per_server: int) -> list[Document]:
    home = [stage for stage, count in enumerate(replicas) for _ in range(count)]
    home += [-1] * (-len(home) % per_server)
    return [
        {"server": start // per_server, "workers": [[start + i, home[start + i]] for i in range(per_server)]}
        for start in range(0, len(home), per_server)
    ]


def drawn_memory(shape: Shape, stage: int, end_s: float, run: bool) -> Document:
    depth = shape.depth(stage)
    times = [end_s * number / 40 for number in range(41)]
    held = [min(number, depth) - (number > depth) * (number % 2) for number in range(40)] + [0]
    sizes = [round((2 + 3 * count / depth) * GIB) for count in held]
    return {
        "stage": stage,
        "worker": sum(shape.replicas[:stage]),
        "capacity_bytes": 16 * GIB,
        "planned_bytes": 5 * GIB,
        "peak_bytes": max(sizes),
        "predicted": {"t": times, "bytes": sizes},
        "measured_peak_bytes": round(1.2 * max(sizes)) if run else None,
    }


def loads(shape: Shape, servers: int, run: bool, name: str) -> list[Document]:
    step_time = shape.step_time_s
    found: list[tuple[str, float, float | None]] = []
    for index in range(shape.stages):
        found.append((f"compute of stage {index + 1}", shape.compute_s(index) / shape.replicas[index], None))
        if shape.replicas[index] > 1:
            found.append((f"gradient synchronisation of stage {index + 1}", 0.28 * step_time, 1.25e9))
        if index:
            found.append((f"traffic from stage {index} to stage {index + 1}{name}", 0.25 * step_time / index, 1.25e9))
    found += [
        (f"network card of server {server}, {way}{name}", share * step_time, 1.25e9)
        for server in range(servers)
        for way, share in (("outgoing", 0.1 + 0.6 / (1 + server)), ("incoming", 0.05 + 0.4 / (1 + server)))
    ]
    found.sort(key=lambda one: -one[1])
    return [
        {
            "name": what,
            "seconds": seconds,
            "share": seconds / step_time,
            "binds": not at,
            "part": False,
            "rate": rate,
            "bytes_per_minibatch": rate and round(seconds * rate),
            "simulated_busy": rate and seconds / step_time,
            "measured_busy": 1.1 * seconds / step_time if rate and run else None,
        }
        for at, (what, seconds, rate) in enumerate(found)
    ]


def measured(shape: Shape) -> Document:
    def pair(predicted: float, ratio: float) -> Document:
        return {"predicted": predicted, "measured": ratio * predicted, "ratio": ratio}

    return {
        "minibatch_s": 1.12 * shape.step_time_s,
        "minibatches_per_s": 1 / 1.12 / shape.step_time_s,
        "ratio": 1.12,
        "cause": "Stage 1 computes 12% longer than predicted: its backward pass takes 15.1 ms instead of 13.3 ms.",
        "run": "20260131T120000Z",
        "stages": [
            {
                "stage": index,
                "workers": [index],
                "forward_s": pair(shape.forward_s[index], 1.1),
                "backward_s": pair(shape.backward_s[index], 1.13),
                "update_s": {"predicted": 0.0004, "measured": None, "ratio": None},
                "sync_s": pair(0.006, 1.2),
                "memory_bytes": pair(6 * GIB, 1.1),
                "wait_s": 0.0012,
                "load_s": None,
                "send_s": 0.0003,
            }
            for index in range(shape.stages)
        ],
    }


def comparisons(step_time: float, name: str) -> list[Document]:
    rows = (
        ("this plan", "15-1", 1.0, ""),
        ("runner-up", "14-2", 1.07, "the best plan with other replica counts" + name),
        ("data parallelism", "16", 2.59, ""),
        ("best straight pipeline", "1-1-1-1-1-1-1", 6.84, ""),
        ("model parallelism", "1-1-1-1-1-1-1", 42.92, "the same stages, not pipelined"),
        ("single worker", "1", None, "does not fit in memory"),
    )
    return [
        {"name": what, "config": config, "minibatch_s": gain and gain * step_time, "gain": gain, "remark": remark}
        for what, config, gain, remark in rows
    ]


HOSTILE = '<img src=x onerror="window.hit=1"></script><script>window.hit=1</script>{{7*7}}'


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
    workers, step_time = sum(replicas), shape.step_time_s
    timeline, end = _timeline(shape, min(lanes, workers), per_server, minibatches, run)
    return {
        "title": title + name,
        "format": "pipeplan-report",
        "version": 1,
        "pipeplan": "0.1.0",
        "made": _made(replicas, per_server, inference, name),
        "prediction": _prediction(shape, name),
        "measured": measured(shape) if run else None,
        "stages": drawn_stages(shape, layers, per_server),
        "graph": drawn_graph(layers, len(replicas), name) if graph else None,
        "placement": drawn_placement(replicas, per_server),
        "timeline": timeline,
        "loads": loads(shape, -(-workers // per_server), run, name),
        "memory": [drawn_memory(shape, stage, end, run) for stage in range(len(replicas))],
        "comparisons": comparisons(step_time, name),
        "certificate": _certificate(step_time, name),
        "words": _words(len(replicas), name),
        "notes": ["The times of the layers are modelled for V100 16 GB, not measured." + name],
    }


def _prediction(shape: Shape, name: str) -> Document:
    step_time = shape.step_time_s
    return {
        "minibatch_s": step_time,
        "minibatches_per_s": 1 / step_time,
        "samples_per_s": 64 / step_time,
        "bound_by": "compute of stage 1",
    }


def _timeline(shape: Shape, lanes: int, per_server: int, minibatches: int, run: bool) -> tuple[Document, float]:
    """Also when the last interval of all ends."""
    workers = sum(shape.replicas)
    predicted = intervals(shape, minibatches, lanes)
    measured = intervals(shape.slower(1.12), minibatches, lanes) if run else None
    end = max((measured or predicted)["end_s"])
    return {
        "lanes": {
            "worker": list(range(lanes)),
            "stage": [shape.stage_of(worker) for worker in range(lanes)],
            "server": [worker // per_server for worker in range(lanes)],
        },
        "end_s": max(predicted["end_s"]),
        "steady": [0.25 * end, 0.8 * end],
        "predicted": predicted,
        "measured": measured,
        "measured_end_s": end if run else None,
        "omitted": f"{workers - lanes} workers are left out." if lanes < workers else "",
    }, end


def _certificate(step_time: float, name: str) -> Document:
    return {
        "proven": True,
        "gap": 0,
        "bound_s": step_time,
        "sentences": [
            f"No plan of this model on this cluster can complete a minibatch in less than {step_time * 1e3:.3g} ms.",
            "The dynamic program and the integer program found the same step time, independently of each other.",
            "`pipeplan check` verifies this from plan.json without either." + name,
        ],
    }


def _made(replicas: tuple[int, ...], per_server: int, inference: bool, name: str) -> Document:
    workers = sum(replicas)
    return {
        "model": "vgg16" + name,
        "minibatch": 64,
        "profile_kind": "modelled",
        "profile_how": "estimated for a V100 from its datasheet" + name,
        "profile_device": "V100 16 GB" + name,
        "cluster": "A" + name,
        "cluster_described": f"{-(-workers // per_server)} servers × {per_server} V100 16 GB",
        "workers": workers,
        "busy": workers,
        "name": f"{'-'.join(map(str, replicas)) if len(replicas) < 12 else 'long'}, 1f1b-stashing",
        "manner": "the forward pass only" if inference else "gradients up to 2 updates old",
        "data_parallel": "",
        "config": "-".join(map(str, replicas)) if len(replicas) < 12 else f"{replicas[0]}-…-{replicas[-1]}",
        "copies": 1,
        "schedule": "forward-only" if inference else "1f1b-stashing",
        "accumulate": None,
        "mode": "inference" if inference else "training",
        "pipeplan": "0.1.0",
        "digest": "sha256:" + "7b15" * 16,
    }


def _words(stages: int, name: str) -> dict[str, list[str]]:
    parts = (
        "placement",
        "stages",
        "graph",
        "timeline",
        "memory",
        "loads",
        "comparisons",
        "measured",
    )
    found = {part: [f"What is to be said of {part}{name}.", f"It has {stages} stages."] for part in parts}
    found["summary"] = [f"{stages} stages for training vgg16{name} on all workers of cluster A, microbatch 64."]
    found["timeline"] += [
        f"Stage {stage + 1}: its workers compute for 90% of the time." for stage in range(min(8, stages))
    ]
    found["measured"] = ["First cause of the difference: stage 1 computes 12% longer than predicted."]
    found["comparisons"].append("The runner-up, 14-2, is 7% slower (the best other plan that was found).")
    return found


def big() -> Document:
    """1,000 layers on 1,024 workers in 64 stages."""
    return document(
        (16,) * 64, layers=1000, per_server=8, minibatches=96, lanes=128, title="big as 16-…-16 on cluster Z"
    )


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
