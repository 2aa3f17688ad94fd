"""Runs of nccl-tests as files, written after their documentation and not by our reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def nccl_tests(
    ranks: int, bandwidth: float, step_s: float, sizes: list[int], *, operation: str = "all_reduce", hosts: int = 1
) -> dict[str, Any]:
    """A run in which every size takes just what a ring at that rate, with that time a step, takes."""
    steps, share = (2 * (ranks - 1), 2 * (ranks - 1) / ranks) if operation == "all_reduce" else (1, 1.0)
    results = []
    for size in sizes:
        seconds = steps * step_s + size * share / bandwidth
        rate = size / seconds / 1e9
        one = {"time": seconds * 1e6, "alg_bw": rate, "bus_bw": rate * share, "nwrong": 0.0}
        row = {"size": size, "count": size // 4, "type": "float", "redop": "sum", "root": "    -1"}
        results.append(row | {"out_of_place": {**one, "time": one["time"] * 2}, "in_place": one})
    devices = [
        {"rank": rank, "group": 0, "pid": 1, "hostname": f"host{rank * hosts // ranks}", "device": rank}
        | {"device_hex": "0000:0f:00", "device_info": "NVIDIA H100 80GB HBM3"}
        for rank in range(ranks)
    ]
    return {
        "version": 2,
        "start_time": "2026-01-31 12:00:00",
        "args": [f"./build/{operation}_perf", "-b", "8", "-J", "out.json"],
        "env": ["HOME=/root"],
        "nccl_version": 22703,
        "config": {"nthreads": 1, "ngpus": 1, "devices": devices},
        "results": results,
        "out_of_bounds": {"count": 0, "okay": "true"},
    }


def written(path: Path, document: Any) -> Path:
    """The document as JSON at `path`."""
    path.write_text(json.dumps(document))
    return path


PIPEDREAM = (
    "node2 -- Conv2d(3, 8) -- forward_compute_time=2.000, backward_compute_time=4.000, "
    "activation_size=100.000, parameter_size=64.000\n"
    "node1 -- Input0 -- forward_compute_time=9.000, backward_compute_time=0.000, "
    "activation_size=10.0, parameter_size=0.000\n"
    "node3 -- ReLU(inplace) -- forward_compute_time=1.000, backward_compute_time=1.5, "
    "activation_size=[60.0; 40.0], parameter_size=0.000 -- stage_id=3\n"
    "node4 -- __getitem__(0) -- forward_compute_time=0.000, backward_compute_time=0.000, "
    "activation_size=60.0, parameter_size=0.000\n"
    "\tnode1 -- node2\n\tnode2 -- node3\n\tnode3 -- node4\n"
)
