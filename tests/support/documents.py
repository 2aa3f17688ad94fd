"""Documents as `pipeplan report` embeds them, made up: every kind of plan that the page must show; hostile names."""

from __future__ import annotations

from typing import Any

import drawn
import figured
from pipelines import Shape, intervals

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
    workers, pace = sum(replicas), shape.pace_s
    timeline, end = _timeline(shape, min(lanes, workers), per_server, minibatches, run)
    return {
        "title": title + name,
        "format": "pipeplan-report",
        "version": 1,
        "pipeplan": "0.1.0",
        "made": _made(replicas, per_server, inference, name),
        "prediction": _prediction(shape, name),
        "measured": figured.measured(shape) if run else None,
        "stages": drawn.stages(shape, layers, per_server),
        "graph": drawn.graph(layers, len(replicas), name) if graph else None,
        "placement": drawn.placement(replicas, per_server),
        "timeline": timeline,
        "loads": figured.loads(shape, -(-workers // per_server), run, name),
        "memory": [drawn.memory(shape, stage, end, run) for stage in range(len(replicas))],
        "comparisons": figured.comparisons(pace, name),
        "certificate": _certificate(pace, name),
        "words": _words(len(replicas), name),
        "notes": ["The times of the layers are modelled for V100 16 GB, not measured." + name],
    }


def _prediction(shape: Shape, name: str) -> Document:
    pace = shape.pace_s
    return {
        "minibatch_s": pace,
        "minibatches_per_s": 1 / pace,
        "samples_per_s": 64 / pace,
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


def _certificate(pace: float, name: str) -> Document:
    return {
        "proven": True,
        "gap": 0,
        "bound_s": pace,
        "sentences": [
            f"No plan of this model on this cluster can complete a minibatch in less than {pace * 1e3:.3g} ms.",
            "The dynamic program and the integer program found the same pace, independently of each other.",
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
