"""The figures of the example documents: loads, a run, and other plans."""

from __future__ import annotations

from typing import Any

from pipelines import Shape



def loads(shape: Shape, servers: int, run: bool, name: str) -> list[Document]:
    pace = shape.pace_s
    found: list[tuple[str, float, float | None]] = []
    for index in range(shape.stages):
        found.append((f"compute of stage {index + 1}", shape.compute_s(index) / shape.replicas[index], None))
        if shape.replicas[index] > 1:
            found.append((f"gradient synchronisation of stage {index + 1}", 0.28 * pace, 1.25e9))
        if index:
            found.append((f"traffic from stage {index} to stage {index + 1}{name}", 0.25 * pace / index, 1.25e9))
    found += [
        (f"network card of server {server}, {way}{name}", share * pace, 1.25e9)
        for server in range(servers)
        for way, share in (("outgoing", 0.1 + 0.6 / (1 + server)), ("incoming", 0.05 + 0.4 / (1 + server)))
    ]
    found.sort(key=lambda one: -one[1])
    return [
        {
            "name": what,
            "seconds": seconds,
            "share": seconds / pace,
            "binds": not at,
            "part": False,
            "rate": rate,
            "bytes_per_minibatch": rate and round(seconds * rate),
            "simulated_busy": rate and seconds / pace,
            "measured_busy": 1.1 * seconds / pace if rate and run else None,
        }
        for at, (what, seconds, rate) in enumerate(found)
    ]


def measured(shape: Shape) -> Document:
    def pair(predicted: float, ratio: float) -> Document:
        return {"predicted": predicted, "measured": ratio * predicted, "ratio": ratio}

    return {
        "minibatch_s": 1.12 * shape.pace_s,
        "minibatches_per_s": 1 / 1.12 / shape.pace_s,
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


def comparisons(pace: float, name: str) -> list[Document]:
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
