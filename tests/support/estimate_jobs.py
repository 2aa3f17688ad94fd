"""Small models for the tests of estimates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan_launch.job.job import Data, Job


def mlp() -> Job:
    """Two linear layers of 100 → 200 → 50."""
    model = nn.Sequential(nn.Linear(100, 200), nn.ReLU(), nn.Linear(200, 50))
    return Job(model, inputs=lambda n: torch.zeros(n, 100), minibatch=64)


def mlp_in_bfloat16() -> Job:
    """The same under autocast."""
    job = mlp()
    return Job(job.model, inputs=job.inputs, minibatch=64, autocast=torch.bfloat16)


def convolutions() -> Job:
    """A grouped, a depthwise, a strided and a transposed convolution."""
    model = nn.Sequential(
        nn.Conv2d(8, 8, 1, bias=False),
        nn.Conv2d(8, 16, 3, padding=1, groups=2, bias=False),
        nn.Conv2d(16, 16, 5, groups=16, bias=False),
        nn.Conv2d(16, 4, 3, stride=2, bias=False),
        nn.ConvTranspose2d(4, 6, 3, stride=2, bias=False),
    )
    return Job(model, inputs=lambda n: torch.zeros(n, 8, 20, 20), minibatch=4)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LSTM(24, 32, num_layers=2, batch_first=True, bidirectional=True)
        self.second = nn.GRU(64, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)[0])[0]


def recurrent() -> Job:
    """An LSTM of two layers in both directions and a GRU, on 10 steps."""
    return Job(_Recurrent(), inputs=lambda n: torch.zeros(n, 10, 24), minibatch=8)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.project(x).view(len(x), -1, 3, 4, 8).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def attention() -> Job:
    """Causal attention of 4 heads of 8 over 128 places."""
    return Job(_Attention(), inputs=lambda n: torch.zeros(n, 128, 32), minibatch=2)


def enormous() -> Job:
    """149 GiB of parameters."""
    return Job(nn.Sequential(nn.Linear(200_000, 200_000)), inputs=lambda n: torch.zeros(n, 200_000), minibatch=8)


class _Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)


class _Insists(_Small):
    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.rates[1]


def insists() -> Job:
    """A model that looks at numbers while it is built."""
    return Job(_Insists(), inputs=lambda n: torch.zeros(n, 4), minibatch=2)


class _Looks(_Small):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        return self.layer(x)


def looks() -> Job:
    """A model that looks at its data."""
    return Job(_Looks(), inputs=lambda n: torch.zeros(n, 4), minibatch=2)


def residual() -> Job:
    """Batch norm, a skip connection, pooling, a loss and a frozen layer."""
    return Job(_Residual(), inputs=lambda n: torch.zeros(n, 3, 8, 8), loss=None, minibatch=4)


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1).requires_grad_(False)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.pool = nn.MaxPool2d(2)
        self.out = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.norm(self.conv(x)).relu()
        return self.out(self.pool(x).flatten(1))


class _Alone(_Small):
    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if float(x.detach().sum()) > 0 else x


def alone() -> Job:
    """A model that looks at its data in a part of its own."""
    model = nn.Sequential(nn.Linear(4, 4), _Alone(), nn.Linear(4, 4))
    return Job(model, inputs=lambda n: torch.ones(n, 4), minibatch=2)


def tied_with_data() -> Job:
    """Two layers with one weight, which has its data whatever the default device is."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[0].weight = model[1].weight = nn.Parameter(torch.ones(4, 4, device="cpu"))
    return Job(model, inputs=lambda n: torch.zeros(n, 4), minibatch=2)


def _with_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> Job:
    return Job(nn.Linear(4, 3), data=lambda: Data([(torch.ones(4), 0)] * 4), loss=loss, minibatch=4)


def each_loss() -> Job:
    """A loss for each sample."""
    return _with_loss(nn.CrossEntropyLoss(reduction="none"))


def constant_loss() -> Job:
    """A loss from which no gradient leads back."""
    return _with_loss(lambda output, target: functional.cross_entropy(output, target).detach())


def failing_loss() -> Job:
    """A loss that torch refuses for these targets."""
    return _with_loss(functional.poisson_nll_loss)


class _Grouped(nn.Module):
    """Rows that are dealt out to four experts, whose matrices are in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.experts = nn.Parameter(torch.randn(4, 16, 32))

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x)
        ends = torch.arange(1, 5, device=x.device, dtype=torch.int32) * (x.shape[0] // 4)
        return functional.grouped_mm(rows, self.experts, offs=ends)


def grouped() -> Job:
    """A grouped matrix product behind a linear layer."""
    return Job(_Grouped().to(torch.bfloat16), inputs=lambda n: torch.zeros(n, 16, dtype=torch.bfloat16), minibatch=8)


class _Batched(_Grouped):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(self.first(x).reshape(4, -1, 16), self.experts).flatten(0, 1)


def batched() -> Job:
    """The same work as one product for each expert."""
    return Job(_Batched().to(torch.bfloat16), inputs=lambda n: torch.zeros(n, 16, dtype=torch.bfloat16), minibatch=8)


class _Inverse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.first(x)
        return torch.linalg.inv(rows.T @ rows + torch.eye(16, device=x.device))


def inverse() -> Job:
    """An operator whose FLOPs nobody counts."""
    return Job(_Inverse(), inputs=lambda n: torch.zeros(n, 16), minibatch=8)


def _experts(implementation: str | None) -> Job:
    import transformers

    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        use_cache=False,
    )
    if implementation is not None:
        config._experts_implementation = implementation
    model = transformers.MixtralForCausalLM(config)
    return Job(model, inputs=lambda n: {"input_ids": torch.zeros(n, 8, dtype=torch.long)}, minibatch=2)


def default_experts() -> Job:
    """transformers' mixture of experts as it comes: grouped products."""
    return _experts(None)


def batched_experts() -> Job:
    """The same with a product for each pair of a token and an expert."""
    return _experts("batched_mm")


def eager_experts() -> Job:
    """The same with a loop over the experts that have tokens, which cannot be traced."""
    return _experts("eager")
