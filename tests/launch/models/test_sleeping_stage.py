"""Emulated stages sleep for the passes that the schedule asks for, also where gradients of weights have their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pipeplan_launch.job.job import StageInfo
from pipeplan_launch.models import sleeping_stage
from pipeplan_launch.models.sleeping_stage import SleepingStage, load_emulated_stages
from pipeplan_launch.plan.launch_plan import CutTraffic, EmulatedLayer, EmulatedStage
from pipeplan_launch.runtime.backward_passes import SplitBackward

FORWARD_S, BACKWARD_S, WEIGHTS_S = 1.0, 4.0, 1.5


class _Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def lap(self) -> float:
        """Seconds since the last call."""
        took, self.now = self.now, 0.0
        return took


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Time:
    clock = _Time()
    monkeypatch.setattr(sleeping_stage, "time", clock)
    return clock


def _forward(layers: int, weights_s: float) -> tuple[SleepingStage, Tensor, Tensor]:
    """(stage between two others, its input, its output)."""
    layer = EmulatedLayer(FORWARD_S, BACKWARD_S, 40, weights_s)
    crossing = CutTraffic(80, 80)
    stage = SleepingStage(1, EmulatedStage((layer,) * layers, 0.0, 8, 1 << 20, crossing, crossing))
    received = torch.zeros(20, requires_grad=True)
    (output,) = stage.call(stage.parameters_by_name(), [received], [], 1)
    return stage, received, output


def test_gradients_of_weights_sleep_in_a_pass_of_their_own(clock: _Time) -> None:
    for layers in (1, 3):
        stage, received, output = _forward(layers, WEIGHTS_S)
        assert clock.lap() == layers * FORWARD_S
        split = SplitBackward([output], [received], stage.parameters_by_name().values())
        split.inputs([torch.zeros_like(output)])
        assert received.grad is not None
        assert received.grad.shape == received.shape
        assert all(weight.grad is None for weight in stage.parameters_by_name().values())
        assert clock.lap() == layers * (BACKWARD_S - WEIGHTS_S)
        split.weights()
        assert all(weight.grad is not None for weight in stage.parameters_by_name().values())
        assert clock.lap() == layers * WEIGHTS_S


def test_a_whole_backward_pass_takes_as_long_however_it_could_be_divided(clock: _Time) -> None:
    for weights_s in (0.0, WEIGHTS_S):
        stage, received, output = _forward(2, weights_s)
        clock.lap()
        output.backward(torch.zeros_like(output))
        assert clock.lap() == 2 * BACKWARD_S
        assert all(one.grad is not None for one in (received, *stage.parameters_by_name().values()))
    with pytest.raises(ValueError, match=r"5\.0 s of a backward pass of 4\.0 s"):
        EmulatedLayer(FORWARD_S, BACKWARD_S, 40, 5.0)


def test_each_stage_of_a_worker_has_an_optimiser_of_its_own(clock: _Time) -> None:
    layer = EmulatedLayer(FORWARD_S, BACKWARD_S, 40, 0.0)
    stages = {
        number: EmulatedStage((layer,), update_s, 8, 1 << 20, None, None) for number, update_s in ((0, 3.0), (3, 7.0))
    }
    job, programs = load_emulated_stages(stages)
    for (number, stage), program in zip(stages.items(), programs, strict=True):
        parameters = program.parameters_by_name()
        info = StageInfo(number, 4, 2, 1, 8, "zb-v", 0, tuple(parameters.items()))
        optimizer = job.make_optimizer(list(parameters.values()), info)
        clock.lap()
        optimizer.step()
        assert clock.lap() == stage.update_s
