"""Goldens of the instruction streams: what every rank of a random pipeline does, in order, under every schedule."""

from __future__ import annotations

import hashlib
import json
import math
import random
from typing import Any

from pipeplan_launch.plan.schedule import SCHEDULES, StageShape

PIPELINES = 200


def streams() -> dict[str, str]:
    """For every pipeline its shape, the digest of all ranks' actions and that of the weight versions they use."""
    later = {"zb-h1", "interleaved-1f1b", "zb-v"}  # left out, so that older answers stay comparable
    names = sorted(SCHEDULES.keys() - later)
    rows = ({"key": f"{seed:03}"} | _pipeline(seed, names[seed % len(names)]) for seed in range(PIPELINES))
    return {"pipelines": "".join(json.dumps(row) + "\n" for row in rows)}


def _pipeline(seed: int, name: str) -> dict[str, Any]:
    chance, schedule = random.Random(f"streams {seed}"), SCHEDULES[name]
    replicas = [chance.randint(1, 8) for _ in range(chance.randint(1, 6))]
    depths: list[int] = []
    behind = 0  # minibatches in flight behind the stage
    for count in reversed(replicas):
        depths.insert(0, 1 + math.ceil(behind / count) + chance.choice([0, 0, 1]))
        behind = depths[0] * count
    accumulate = None
    if name in ("2bw", "gpipe", "1f1b-flush"):
        least = max(r * d for r, d in zip(replicas, depths, strict=True)) if name == "2bw" else 1
        accumulate = least + chance.randint(0, 12)
    if name == "gpipe" and accumulate:
        depths = [math.ceil(accumulate / count) for count in replicas]
    minibatches = chance.randint(1, 3 * max(r * d for r, d in zip(replicas, depths, strict=True)))
    pipeline = [StageShape(r, d, accumulate) for r, d in zip(replicas, depths, strict=True)]
    actions = hashlib.sha256()
    versions = hashlib.sha256()
    first = ""
    for stage, count in enumerate(replicas):
        for replica in range(count):
            line = " ".join(map(str, schedule.stream(pipeline, stage, replica, minibatches)))
            first = first or line
            actions.update(f"{stage}.{replica}: {line}\n".encode())
        used = [schedule.version(pipeline, stage, number) for number in range(minibatches)]
        versions.update(f"{stage}: {used}\n".encode())
    shape = " ".join(f"{r}x{d}" for r, d in zip(replicas, depths, strict=True))
    return {
        "schedule": name,
        "replicas x depth": shape,
        "accumulate": accumulate,
        "minibatches": minibatches,
        "begins": first[:60],
        "actions": actions.hexdigest()[:16],
        "versions": versions.hexdigest()[:16],
    }
