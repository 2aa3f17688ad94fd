"""Small workloads in both formats, written after their documentation and not by our readers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipeplan.profile_data.profile import Profile


def dnn_partitioning(profile: Profile, *, training: bool = True) -> dict[str, Any]:
    """A layer graph as the published ones are made: ms, size = output + weights, backward edges beside the forward."""
    made = {tensor.producer: tensor.bytes for tensor in profile.tensors}
    number = {layer.name: index for index, layer in enumerate(profile.layers)}
    count = len(number)
    nodes, edges = [], []
    for layer in profile.layers:
        size = float(made.get(layer.name, 4096) + layer.parameter_bytes)
        common = {"supportedOnFpga": 1, "colorClass": number[layer.name], "size": size}
        for backward, seconds in enumerate((layer.forward_s, layer.backward_s)[: 1 + training]):
            latency = {"cpuLatency": seconds * 1e4, "fpgaLatency": seconds * 1e3}
            name, identity = layer.name + "grad" * backward, number[layer.name] + count * backward
            nodes.append({"name": name, "id": identity, "isBackwardNode": backward} | latency | common)
    for tensor in profile.tensors:
        for consumer in tensor.consumers:
            source, target = number[tensor.producer], number[consumer]
            edges.append({"sourceId": source, "destId": target, "cost": 0.1, "size": float(tensor.bytes)})
            if training:
                size = float(made.get(consumer, 4096))
                edges.append({"sourceId": source + count, "destId": target + count, "cost": 0.1, "size": size})
    return {"maxSizePerFPGA": 1.6e10, "maxFPGAs": 6, "maxCPUs": 1, "nodes": nodes, "edges": edges}


def piper(profile: Profile) -> dict[str, Any]:
    """A workload as the published ones are made: two ways to run a node, the second recomputes."""
    number = {layer.name: index for index, layer in enumerate(profile.layers)}
    nodes = []
    for layer in profile.layers:
        total = (layer.forward_s + layer.backward_s) * 1e3
        plain = {
            "id": "vanilla",
            "timePerSample": total,
            "parameterSize": float(layer.parameter_bytes),
            "memoryUsageA": float(layer.saved_bytes),
            "memoryUsageB": 2.0 * layer.parameter_bytes,
            "syncTimeFw": {},
            "syncTimeBw": {},
        }
        again = plain | {"id": "activation recomp", "timePerSample": total + layer.forward_s * 1e3}
        nodes.append({"id": number[layer.name], "name": layer.name, "TMPCs": {"1": [plain, again], "2": [plain]}})
    edges = [
        {"sourceId": number[tensor.producer], "destId": number[consumer], "communicationCost": float(tensor.bytes)}
        for tensor in profile.tensors
        for consumer in tensor.consumers
    ]
    limits = {"maxDevices": 10, "maxMemoryPerDevice": 8e10, "bandwidth": 2.5e10, "mbsInBatch": 256}
    return limits | {"nodes": nodes, "edges": edges}


def written(path: Path, document: Any) -> Path:
    """The document as JSON at `path`."""
    path.write_text(json.dumps(document))
    return path
