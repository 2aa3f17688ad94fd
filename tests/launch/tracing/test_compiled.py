"""Stages compiled by torch.compile: close to the uncompiled ones, and refused in one line where that cannot be."""

from __future__ import annotations

import shutil

import pytest
import torch
from extents import slow_but_for
from torch import Tensor, nn

from pipeplan_launch.errors import LaunchError
from pipeplan_launch.job.job import Job
from pipeplan_launch.tracing import compiled
from pipeplan_launch.tracing.split import StageProgram, build_stage_program
from pipeplan_launch.tracing.trace import trace_job

CPU = torch.device("cpu")


def _stage() -> StageProgram:
    """The first of two stages; its BatchNorm writes its buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    traced = trace_job(Job(model, inputs=lambda n: torch.randn(n, 6)), 4, "layer")
    return build_stage_program(traced, [["0", "1", "2"], ["3", "loss"]], 0)


def _step(stage: StageProgram, inputs: Tensor) -> list[Tensor]:
    (made,) = stage((), [inputs], len(inputs))
    made.square().sum().backward()
    gradients = [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]
    stage.eval()
    with torch.no_grad():
        (evaluated,) = stage((), [inputs], len(inputs))
    stage.train()
    return [made, evaluated, *gradients, *stage.buffers_by_name().values()]


@pytest.mark.parametrize("backend", slow_but_for(["aot_eager"], ["aot_eager", "inductor"]))
def test_a_compiled_stage_trains_and_evaluates_as_the_stage_does(backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    plain, stage = _stage(), _stage()
    stage.compile_with(backend)
    for samples in (4, 3):  # the last minibatch of an epoch is shorter
        inputs = torch.randn(samples, 6)
        for ours, theirs in zip(_step(stage, inputs), _step(plain, inputs), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        LaunchError, match=r"--compile-backend: torch.compile has no backend 'inducter' here, only .*in"
    ):
        compiled.check_compiler("inducter", CPU)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", _raises)
    with pytest.raises(LaunchError, match=r"^--compile needs a C\+\+ compiler .* leave it out"):
        compiled.check_compiler("inductor", CPU)
    torch._dynamo.reset()
    run = compiled.compiled_function(lambda x: x + 1, _raises)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=r"torch.compile fails on this stage .*leave out --compile"):
        run(torch.ones(2))


def _raises(*_: object) -> str:
    raise RuntimeError("No working C++ compiler found")
