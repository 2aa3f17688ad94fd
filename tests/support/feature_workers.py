"""Jobs, each a function that builds one, and their runs by real workers, which build, trace and cut the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from saved import latest, model_of
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.utils.data import TensorDataset
from toy_workers import stage_contents, write_plan
from worker_host import start_attempt

from pipeplan_launch import Data, Job, __main__, load_job
from pipeplan_launch.checkpoint.manifest import MODEL_PREFIX
from pipeplan_launch.export import unsaved_weights
from pipeplan_launch.tracing.trace import TracedModel, trace_job

SAMPLES, MINIBATCH = 14, 4


@dataclass
class Found:
    """What the model returns."""

    scores: Tensor
    sure: Tensor
    chosen: dict[str, Tensor]


torch.export.register_dataclass(Found, serialized_type_name="Found")


class Everything(nn.Module):
    """A frozen backbone, whole numbers and truth values that cross two cuts, skips over the middle, a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Linear(6, 8).requires_grad_(False)
        self.stem, self.middle, self.late = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.table, self.norm, self.head = nn.Embedding(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Found:
        seen = torch.tanh(self.backbone(x))
        positive, largest = seen.sum(dim=1, keepdim=True) > 0, seen.argmax(dim=1)
        stem = functional.gelu(self.stem(seen))
        middle = functional.gelu(self.middle(stem))
        late = torch.where(positive, self.late(middle), middle) + stem
        scores = self.head(self.norm(late + seen + self.table(largest)))
        return Found(scores, positive.squeeze(1), {"largest": largest})


def loss(output: Found, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.scores, target) + 0.01 * output.scores[output.chosen["largest"] > 2].sum()


def right(output: Found, target: Tensor) -> Tensor:
    return (output.scores.argmax(dim=1) == target).sum()


def data() -> Data:
    generator = torch.Generator().manual_seed(1)
    inputs, targets = (
        torch.randn(2 * SAMPLES, 6, generator=generator),
        torch.randint(3, (2 * SAMPLES,), generator=generator),
    )
    return Data(TensorDataset(inputs[:SAMPLES], targets[:SAMPLES]), TensorDataset(inputs[SAMPLES:], targets[SAMPLES:]))


def share_sure(output: Found, target: Tensor) -> Tensor:
    return output.sure.float().mean()


def margin(output: Found, target: Tensor) -> float:
    best = output.scores.float().topk(2, dim=1).values
    return (best[:, 0] - best[:, 1]).mean().item()


def with_momentum(parameters: list[nn.Parameter]) -> SGD:
    return SGD(parameters, lr=0.1, momentum=0.9)


def everything(**more: Any) -> Job:
    return Job(
        Everything(),
        loss=loss,
        data=data,
        optimizer=with_momentum,
        metric=right,
        metrics={"sure": share_sure, "margin": margin},
        minibatch=MINIBATCH,
        **more,
    )


def half() -> Job:
    return everything(autocast=torch.bfloat16)


def traced(name: str) -> TracedModel:
    job = load_job(reference(name), 0)
    return trace_job(job, job.minibatch)


def reference(name: str) -> str:
    """The reference of a job of this file, or the name itself if it is a reference."""
    return name if ":" in name else f"{__file__}:{name}"


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
    arguments = [str(folder), "--run-dir", str(folder / "run"), "--threads", "1", "--log-every", "0", *options]
    ended = start_attempt(__main__.main, [(arguments,)] * world, folder).finish()
    assert ended.statuses == [0] * world, ended.err
    return folder / "run"


def trained(run: Path) -> dict[str, Tensor]:
    """The model's state in a run's last checkpoint, with frozen weights that the job builds."""
    manifest = latest(run)
    frozen = unsaved_weights(manifest) if manifest.frozen else {}
    return model_of(manifest) | {name.removeprefix(MODEL_PREFIX): one for name, one in frozen.items()}
