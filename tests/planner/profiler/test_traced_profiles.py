"""A profile says how its model was traced; models that are called by keyword are profiled as others are."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from pipeplan.cli.profile.table import measured_profile
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.profiler import profile_model

SOURCE = """
import torch
from torch import nn
from pipeplan_launch import Data, Job


class Chooses(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (2 if x.sum() > 0 else 3)


class Model(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.first, self.part, self.last = nn.Linear(4, 8), part, nn.Linear(8, 3)

    def forward(self, *, x, shift=None):
        return self.last(self.part(self.first(x) + shift))


def job(part):
    samples = [{"x": torch.randn(4), "shift": torch.randn(8)} for _ in range(12)]
    loss = lambda output, batch: output.square().mean() + 0 * batch["x"].sum()
    return Job(Model(part), loss=loss, data=lambda: Data(samples), minibatch=5)


def plain():
    return job(nn.Linear(8, 8))


def chooses():
    return job(Chooses(8, 8))
"""


@pytest.mark.parametrize(
    ("name", "traced", "line"),
    [
        ("plain", "torch.export", ""),
        ("chooses", "torch.export; taken whole: part", "Traced by torch.export; taken whole: part"),
    ],
)
def test_the_profile_says_how_the_model_was_traced(tmp_path: Path, name: str, traced: str, line: str) -> None:
    (tmp_path / "model.py").write_text(SOURCE)
    profile = profile_model(f"{tmp_path / 'model.py'}:{name}", ProfilerOptions(repeats=2))
    assert profile.provenance.traced == traced
    assert [layer.name for layer in profile.layers] == ["first", "add", "part", "last", "loss"]
    part = next(layer for layer in profile.layers if layer.name == "part")
    assert part.parameter_bytes == 4 * (8 * 8 + 8)
    profile.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json").provenance.traced == traced
    printed = io.StringIO()
    Console(file=printed, width=200).print(*measured_profile(profile), sep="\n")
    assert ("Traced by" in printed.getvalue()) == bool(line)
    assert line in printed.getvalue()
