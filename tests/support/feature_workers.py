"""Run a job of `feature_jobs` by real workers, from its reference on: each builds, traces and cuts the model itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import feature_jobs
import torch
from torch import Tensor
from toy_workers import stage_contents, write_plan
from worker_host import launch_environment, run_workers

from pipeplan_launch import __main__, load_job
from pipeplan_launch.checkpoint import tensor_store
from pipeplan_launch.checkpoint.checkpoint import latest_checkpoint
from pipeplan_launch.checkpoint.manifest import MODEL_PREFIX
from pipeplan_launch.tracing.trace import TracedModel, trace_job


def traced(name: str) -> TracedModel:
    job = load_job(reference(name), 0)
    return trace_job(job, job.minibatch)


def reference(name: str) -> str:
    """The reference of a job of `feature_jobs`, or the name itself if it is a reference."""
    return name if ":" in name else f"{feature_jobs.__file__}:{name}"


def cut_before(model: TracedModel, *firsts: str) -> list[list[str]]:
    """Stages that begin with these layers, in the order of the model."""
    stages: list[list[str]] = [[]]
    for layer in model.layers:
        if layer.name in firsts:
            stages.append([])
        stages[-1].append(layer.name)
    assert len(stages) == len(firsts) + 1
    return stages


def run(folder: Path, name: str, stages: list[list[str]], replicas: Sequence[int], *options: str, **plan: Any) -> Path:
    """The run folder of a training run that has ended well."""
    contents = stage_contents(replicas, minibatch=load_job(reference(name), 0).minibatch, **plan)
    for content, layers in zip(contents, stages, strict=True):
        content |= {"layers": layers, "model": {"ref": reference(name)}}
    write_plan(folder, contents)
    world = sum(replicas)
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = [str(folder), "--run-dir", str(folder / "run"), "--threads", "1", "--log-every", "0", *options]
    ended = run_workers(
        __main__.main,
        [(arguments,)] * world,
        folder,
        environments=[launch_environment(rank, world, store.port) for rank in range(world)],
    )
    assert ended.statuses == [0] * world, ended.err
    return folder / "run"


def trained(run: Path) -> dict[str, Tensor]:
    """The model's state in a run's last checkpoint."""
    manifest = latest_checkpoint(run)
    assert manifest is not None
    found = tensor_store.load_tensors(manifest, [name for name in manifest.tensors if name.startswith(MODEL_PREFIX)])
    return {name.removeprefix(MODEL_PREFIX): value for name, value in found.items()}
