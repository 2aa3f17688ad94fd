"""A model run layer by layer computes what it computes as a whole."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from pipeplan.profiler.clock import CPUClock
from pipeplan.profiler.layer_run import LayerRun
from pipeplan.profiler.memory import SavedBytes
from pipeplan.profiler.overhead import measure_overhead, unmeasured
from pipeplan_launch import Job, load_job
from pipeplan_launch.job.job import Batch
from pipeplan_launch.tracing.trace import trace_job

torch.set_num_threads(1)
CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["mnist", "resnet-tiny"])
def test_equals_the_whole(name: str) -> None:
    job = load_job(name, seed=0)
    assert job.loss is not None
    run = LayerRun(trace_job(job, 4), job.example_batch(4), job.loss, 4, CPU)
    whole = copy.deepcopy(job.model)
    expected = job.loss(whole(*run.batch.inputs), run.batch.target)
    expected.backward()

    gradients: dict[str, Tensor] = {}
    for key, parameter in job.model.named_parameters():
        parameter.register_hook(lambda gradient, key=key: gradients.update({key: gradient.clone()}))
    seen: dict[str, list[Tensor]] = {}
    forward = run.forward(unmeasured, look=lambda layer, made: seen.update({layer: list(made)}))
    assert torch.equal(seen["loss"][0], expected)
    backward = run.backward(unmeasured)
    assert list(forward) == list(reversed(backward)) == [layer.name for layer in run.traced.layers]
    for key, parameter in whole.named_parameters():
        assert torch.equal(gradients[key], parameter.grad), key
    overhead = measure_overhead(run, CPUClock(1), CPU, passes=2)
    assert (overhead.forward_s > 0.0, overhead.backward_s > 0.0) == (True, True)


def test_groups_that_write_in_place() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x) * 2
            y[:, 0] = 1.0
            return self.last(y * y.sum())

    job = Job(Writes(), inputs=lambda n: torch.randn(n, 4))
    traced = trace_job(job, 3)
    assert traced.together
    run = LayerRun(traced, Batch(job.example_inputs(3), None), lambda output, target: output.sum(), 3, CPU)
    run.forward(unmeasured)
    run.backward(unmeasured)


def saved(model: nn.Module, width: int, minibatch: int) -> dict[str, int]:
    job = Job(model, inputs=lambda n: torch.randn(n, width))
    batch = Batch(job.example_inputs(minibatch), None)
    run = LayerRun(trace_job(job, minibatch), batch, lambda output, target: output.sum(), minibatch, CPU)
    counted = SavedBytes([*model.parameters(), *batch.inputs])
    run.forward(unmeasured, counted.watch)
    return dict(counted.by_layer)


class Scales(nn.Module):
    """Multiplication by a number saves nothing, so that the linear after it is charged for its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) * 2)


def test_saved_bytes_count_every_storage_once_for_the_first_that_saves() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7), nn.Sigmoid(), nn.Linear(7, 1))
    # The first linear saves the model's input only; ReLU and Sigmoid save what the next linear saves again.
    assert saved(model, width=3, minibatch=10) == {"1": 10 * 5 * 4, "3": 10 * 7 * 4}
    assert saved(Scales(), width=3, minibatch=8) == {"last": 8 * 4 * 4}
