"""Models that take `*args` or `**kwargs`, differentiate inside themselves, or are in one of torch's wrappers."""

from __future__ import annotations

import pytest
import torch
from stagewise import BATCH, job_of, train_beside_one_process
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from pipeplan_launch import Job
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.tracing.trace import trace_job


class Positional(nn.Linear):
    def forward(self, *args: Tensor) -> Tensor:
        return super().forward(args[0])


class Further(nn.Linear):
    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return super().forward(x) * others[0]


class Mixed(nn.Linear):
    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return super().forward(x) * others["scale"] + others["also"]


def test_variable_arguments() -> None:
    for kind, inputs in (
        (Positional, lambda n: torch.randn(n, 4)),
        (Further, lambda n: (torch.randn(n, 4), torch.randn(n, 4))),
        (Mixed, lambda n: {name: torch.randn(n, 4) for name in ("x", "scale", "also")}),
    ):
        torch.manual_seed(0)
        assert train_beside_one_process(Job(kind(4, 4), inputs=inputs)).dynamic_batch


class Differentiates(nn.Module):
    """The gradient of an energy, as its output."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return torch.autograd.grad(self.energy(x).sigmoid().sum(), x, create_graph=True)[0]


def test_a_module_that_differentiates_is_taken_whole() -> None:
    torch.manual_seed(0)
    traced = train_beside_one_process(job_of(nn.Sequential(nn.Linear(4, 4), Differentiates(), nn.Linear(4, 2))))
    assert traced.how == "torch.export; taken whole: 1"


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


def test_wrappers_of_a_model_are_taken_off_and_those_inside_it_traced() -> None:
    for wrap in (torch.compile, nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))):
        model = layers()
        job = job_of(wrap(model))
        assert job.model is model
        assert [layer.name for layer in trace_job(job, BATCH).layers] == ["0", "1", "2", "loss"]
    for wrap in (torch.compile, nn.DataParallel, AveragedModel):
        torch.manual_seed(0)
        traced = trace_job(job_of(nn.Sequential(nn.Linear(4, 4), wrap(layers()), nn.Linear(2, 2))), BATCH)
        assert traced.how == "torch.export"
        assert len(traced.layers) == 6


class DistributedDataParallel(nn.Module):
    """Stands for torch's, which needs a process group."""

    __module__ = "torch.nn.parallel.distributed"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_other_wrappers_are_refused() -> None:
    for wrap, says in (
        (lambda model: nn.Sequential(torch.jit.script(model)), "holds a ScriptModule at '0': TorchScript has no"),
        (DistributedDataParallel, "is a DistributedDataParallel: give the module inside it: pipeplan divides the work"),
        (lambda model: nn.Sequential(DistributedDataParallel(model)), "holds a DistributedDataParallel at '0': give"),
    ):
        with pytest.raises(LaunchError, match=says):
            job_of(wrap(layers()))
