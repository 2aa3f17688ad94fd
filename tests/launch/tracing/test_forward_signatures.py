"""Models that take `*args` or `**kwargs`, differentiate inside themselves, or are in one of torch's wrappers."""

from __future__ import annotations

import pytest
import torch
from beside_one_process import BATCH, job_of, train_beside_one_process
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


class Keywords(nn.Linear):
    def forward(self, **inputs: Tensor) -> Tensor:
        return super().forward(inputs["x"])


class Mixed(nn.Linear):
    def forward(self, x: Tensor, **others: Tensor) -> Tensor:
        return super().forward(x) * others["scale"] + others["also"]


def two(n: int) -> tuple[Tensor, ...]:
    return torch.randn(n, 4), torch.randn(n, 4)


def named(*names: str):
    return lambda n: {name: torch.randn(n, 4) for name in names}


@pytest.mark.parametrize(
    ("kind", "inputs"),
    [
        (Positional, lambda n: torch.randn(n, 4)),
        (Further, two),
        (Keywords, named("x")),
        (Mixed, named("x", "scale", "also")),
    ],
)
def test_variable_arguments(kind: type[nn.Module], inputs) -> None:
    torch.manual_seed(0)
    traced = train_beside_one_process(Job(kind(4, 4), inputs=inputs))
    assert traced.dynamic_batch


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


def test_a_model_that_differentiates_itself_is_refused() -> None:
    says = r"\(.*torch.autograd.grad\(self.energy.*\): forward\(\) differentiates inside itself, .*submodule of its own"
    with pytest.raises(LaunchError, match=says):
        trace_job(job_of(Differentiates()), BATCH)


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, lambda model: nn.DataParallel(torch.compile(model))])
def test_the_model_inside_a_wrapper_is_taken(wrap) -> None:
    model = layers()
    job = job_of(wrap(model))
    assert job.model is model
    assert [layer.name for layer in trace_job(job, BATCH).layers] == ["0", "1", "2", "loss"]


@pytest.mark.parametrize("wrap", [torch.compile, nn.DataParallel, AveragedModel])
def test_wrappers_inside_a_model_are_traced(wrap) -> None:
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


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (AveragedModel, "is an AveragedModel, which does not train: give the model that it averages"),
        (torch.jit.script, "is a ScriptModule: TorchScript has no Python code to trace: give the module that it was"),
        (lambda model: nn.Sequential(torch.jit.script(model)), "holds a ScriptModule at '0': TorchScript has no"),
        (DistributedDataParallel, "is a DistributedDataParallel: give the module inside it: pipeplan divides the work"),
        (lambda model: nn.Sequential(DistributedDataParallel(model)), "holds a DistributedDataParallel at '0': give"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_other_wrappers_are_refused(wrap, says: str) -> None:
    with pytest.raises(LaunchError, match=says):
        job_of(wrap(layers()))
