"""The first example of docs/models.md runs as it stands; test_tracing_hf.py has the other."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from repository import ROOT
from torch.nn import functional

from pipeplan_launch import load_job
from pipeplan_launch.tracing.split import build_stage_program
from pipeplan_launch.tracing.trace import trace_job

torch.set_num_threads(1)
DOCUMENT = ROOT / "docs" / "models.md"


def test_the_job_file_of_the_documentation(tmp_path: Path) -> None:
    source, _ = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert len(source.splitlines()) <= 20
    (tmp_path / "circles.py").write_text(source)
    job = load_job(f"{tmp_path / 'circles.py'}:make", seed=0)
    traced = trace_job(job, job.minibatch)
    assert [layer.name for layer in traced.layers] == ["0", "1", "2", "3", "4", "loss"]
    stages = [["0", "1"], ["2", "3", "4", "loss"]]
    first, second = (build_stage_program(traced, stages, stage) for stage in range(2))
    optimizers = [job.make_optimizer(list(stage.parameters())) for stage in (first, second)]
    points, labels = (tensor[:512] for tensor in job.datasets.train.tensors)
    for _ in range(60):
        output = second(first([], [points], 512), [], 512)
        functional.cross_entropy(output, labels).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert job.correct(output, labels) > 0.95 * 512
