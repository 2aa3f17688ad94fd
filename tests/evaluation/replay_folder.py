"""The emulated plan folder, whose stages sleep instead of computing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replay_network import Rings, Scaling

from pipeplan.cluster_data.cluster_document import cluster_from_json
from pipeplan.plan import schedules
from pipeplan.plan.plan import Plan
from pipeplan.problem.plan_file import PlanFile
from pipeplan.profile_data.profile import Profile
from pipeplan.simulation.scenario import PredictedStage
from pipeplan.util.files import Node, read_document, write_text
from pipeplan_launch.files import with_checksum

LEAST_LAYER_S = 0.002
"""Least forward time of an emulated layer, in seconds of the emulation. Shorter neighbours are merged."""


def write_folder(
    source: Path, root: Node, profile: Profile | None, scaling: Scaling, rings: Rings, minibatches: int, folder: Path
) -> None:
    """Write the emulation of the plan folder at `source`, whose plan.json is `root`, for so many minibatches."""
    plan = rings.plan
    step_time_s = PlanFile.of(root).step_s
    sizes = cluster_from_json(root["cluster"]).server_sizes  # the emulated network has idle servers, too
    servers: dict[str, Any] = {"servers": len(sizes), "workers_per_server": max(sizes)}
    servers |= {"server_sizes": list(sizes)} if len(set(sizes)) > 1 else {}
    for index, prediction in enumerate(PlanFile.of(root).prediction.stages):
        document = read_document(source / "stages" / f"stage-{index}.json", "pipeplan-stage", 1).mapping()
        emulation = {
            "layers": _layers(plan, index, prediction, profile, scaling, rings.inflation(index)),
            "update_s": _update_s(plan, prediction) * scaling.time_by,
            "before": _crossing(prediction.receive_bytes, prediction.send_gradient_bytes, scaling) if index else None,
            "after": _crossing(prediction.send_bytes, prediction.receive_gradient_bytes, scaling)
            if index < len(plan.stages) - 1
            else None,
            "minibatches": minibatches,
            "bucket_bytes": rings.bucket_bytes(index, scaling),
        }
        changes = {
            "model": {"ref": "emulated", "graph_hash": "emulated", "granularity": "layer"},
            "minibatch": 1,
            "device": "cpu",
            "emulation": emulation,
            "links": None,
            **servers,
            "prediction": {"minibatch_s": step_time_s * scaling.time_by},
        }
        write_text(folder / "stages" / f"stage-{index}.json", with_checksum(document | changes, indent=1))


def _update_s(plan: Plan, prediction: PredictedStage) -> float:
    """Seconds of one step of the optimiser. The prediction has its share per minibatch of a replica."""
    return prediction.update_s / float(schedules.update_share(plan.accumulate)) if prediction.update_s else 0.0


def _layers(
    plan: Plan, index: int, prediction: PredictedStage, profile: Profile | None, scaling: Scaling, inflation: float
) -> list[dict[str, Any]]:
    """The stage's times and parameters as layers, in proportion to the layers of the profile."""
    stage = plan.stages[index]
    forward, backward = prediction.forward_s, prediction.backward_s
    if stage.recompute:  # the executor itself runs the second forward pass
        backward = max(0.0, backward - forward)
    size = 0.0 if plan.inference else prediction.parameter_bytes * inflation
    shares = _shares(stage.layers, profile)
    pieces = [
        {
            "forward_s": forward * one[0] * scaling.time_by,
            "backward_s": backward * one[1] * scaling.time_by,
            "parameter_bytes": scaling.size(size * one[2]),
            # Which layer makes how many of the gradients makes no difference, as one pass makes those of the stage.
            "weights_s": prediction.weights_s * one[1] * scaling.time_by,
        }
        for one in shares
    ]
    return _put_together(pieces)


def _shares(names: Sequence[str], profile: Profile | None) -> list[tuple[float, float, float]]:
    """Shares of the stage's forward time, backward time and parameters, by layer; one layer without a profile."""
    if profile is None:
        return [(1.0, 1.0, 1.0)]
    by_name = {layer.name: layer for layer in profile.layers}
    layers = [by_name[name] for name in names]
    columns = [
        _normal([layer.forward_s for layer in layers]),
        _normal([layer.backward_s for layer in layers]),
        _normal([float(layer.parameter_bytes) for layer in layers]),
    ]
    return list(zip(*columns, strict=True))


def _normal(values: Sequence[float]) -> list[float]:
    total = sum(values)
    return [value / total if total else 1 / len(values) for value in values]


def _put_together(pieces: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Merge neighbours that are too short for an exact sleep."""
    merged: list[dict[str, Any]] = []
    for piece in pieces:
        if merged and min(merged[-1]["forward_s"], piece["forward_s"]) < LEAST_LAYER_S:
            merged[-1] = {name: merged[-1][name] + value for name, value in piece.items()}
        else:
            merged.append(dict(piece))
    return merged


def _crossing(sent: int, returned: int, scaling: Scaling) -> dict[str, int]:
    return {"sent": scaling.size(sent), "returned": scaling.size(min(sent, returned))}
