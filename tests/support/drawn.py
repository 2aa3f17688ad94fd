"""What the example documents draw: stages and their layers, where they are placed, and their memory."""

from __future__ import annotations

from typing import Any

from pipelines import Shape

Document = dict[str, Any]
GIB = 2**30
LAYERS = ("conv", "relu", "conv", "relu", "pool")


def stages(shape: Shape, layers: int, per_server: int) -> list[Document]:
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


def graph(layers: int, stages: int, name: str) -> Document:
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


def placement(replicas: tuple[int, ...], per_server: int) -> list[Document]:
    home = [stage for stage, count in enumerate(replicas) for _ in range(count)]
    home += [-1] * (-len(home) % per_server)
    return [
        {"server": start // per_server, "workers": [[start + i, home[start + i]] for i in range(per_server)]}
        for start in range(0, len(home), per_server)
    ]


def memory(shape: Shape, stage: int, end_s: float, run: bool) -> Document:
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
