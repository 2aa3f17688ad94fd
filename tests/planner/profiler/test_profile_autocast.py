"""Profiling a job under autocast: the sizes are those of the tensors that it will send and keep."""

from __future__ import annotations

from pathlib import Path

import torch

from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.profiler import profile_model

JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from pipeplan_launch import Data, Job

def make(dtype):
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    data = lambda: Data(TensorDataset(torch.randn(64, 16), torch.randint(4, (64,))))
    return Job(model, loss=nn.functional.cross_entropy, data=data, autocast=dtype)

def plain():
    return make(None)

def half():
    return make(torch.bfloat16)
"""


def test_activations_take_half_the_bytes(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    (tmp_path / "halves.py").write_text(JOB)
    options = ProfilerOptions(batches=(32,), repeats=3, warmup=1)
    try:
        plain, half = (profile_model(f"{tmp_path}/halves.py:{name}", options) for name in ("plain", "half"))
    finally:
        torch.set_num_threads(threads)
    assert [one.bytes for one in plain.tensors] == [2 * one.bytes for one in half.tensors]
    assert [one.parameter_bytes for one in plain.layers] == [one.parameter_bytes for one in half.layers]
    saved = {layer.name: layer.saved_bytes for layer in half.layers}
    # What a matrix product keeps: its weight in bfloat16, a copy that only autograd holds. Its input is counted where
    # it was made.
    assert saved["2"] >= 2 * 64 * 64
    assert plain.graph_hash != half.graph_hash
