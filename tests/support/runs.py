"""Run folders as the executor would leave them, of stages that take known times, and what they are runs of."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeplan.cluster_data.cluster import Cluster, Device, Level
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile

NAMES = ("forward_s", "backward_s", "update_s", "sync_s")
OWN = ("load_s", "send_s", "other_s", "wait_s")
GIB = 2**30


def chain(times: list[tuple[float, float, float]], parameters: int = 1000, **more: Any) -> Profile:
    """Layers in a row, with (forward, backward, update) seconds."""
    layers = tuple(
        Layer(f"l{index}", forward, backward, parameters, 10, update_s=update)
        for index, (forward, backward, update) in enumerate(times)
    )
    names = [layer.name for layer in layers]
    tensors = tuple(Tensor(one, one, (other,), 8, 8) for one, other in itertools.pairwise(names))
    return Profile(layers, tensors, 4, model_ref="m.py:f", model_name="m", **more)


def cluster(workers: int, *, cores: int = 0, bandwidth: float = 1e6, efficiency: float = 0.5) -> Cluster:
    level = Level("server", workers, bandwidth, 0.0, efficiency, efficiency, "nominal")
    return Cluster("here", Device("cpu", "cpu", 8 * GIB, cores=cores), (level,))


def stage_entry(index: int, workers: Sequence[int], measured: Mapping[str, float]) -> dict[str, Any]:
    """One stage of a summary: times that are not given are 0, and all of them were computing."""
    times = dict.fromkeys((*NAMES, *OWN), 0.0) | measured
    busy = sum(value for name, value in times.items() if name in (*NAMES, *OWN) and name != "wait_s")
    own = {name: times[name] for name in OWN} | {"cpu_s": measured.get("cpu_s", busy)}
    own["core_wait_s"] = measured.get("core_wait_s", 0.0)
    pairs = {name: {"predicted": 0.0, "measured": times[name], "ratio": None} for name in NAMES}
    return {"stage": index, "workers": list(workers), **pairs, "measured": own}


def summary_of(
    plan_folder: Path, step_time_s: float, stages: Sequence[Mapping[str, float]], **more: Any
) -> dict[str, Any]:
    """The summary of a run of a plan folder, of so many seconds a minibatch."""
    first = json.loads((plan_folder / "stages" / "stage-0.json").read_text())
    workers = [one["workers"] for one in first["pipeline"]]
    return {
        "format": "pipeplan-summary",
        "version": 1,
        "plan": first["plan"],
        "mode": first["mode"],
        "minibatch_s": {"predicted": first["prediction"]["minibatch_s"], "measured": step_time_s, "ratio": None},
        "includes_fill": False,
        "steady_minibatches": 50,
        "stages": [stage_entry(index, *one) for index, one in enumerate(zip(workers, stages, strict=True))],
    } | more


def write_run(plan_folder: Path, name: str, summary: Mapping[str, Any]) -> Path:
    """A run folder in a plan folder."""
    folder = plan_folder / "runs" / name
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder
