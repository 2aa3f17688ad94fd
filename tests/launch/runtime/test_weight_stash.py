"""Weight versions against explicit copies of every version, with optimisers that autograd cannot watch among them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RMSprop

from pipeplan_launch.runtime.weight_stash import WeightVersions

torch.set_num_threads(1)
MINIBATCHES = 12
OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd-foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd-loop": lambda p: SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, foreach=False),
    "adam-loop": lambda p: Adam(p, lr=0.02, foreach=False, weight_decay=0.1, amsgrad=True),
    "adamw-foreach": lambda p: AdamW(p, lr=0.02, foreach=True),
    "adamw-fused": lambda p: AdamW(p, lr=0.02, fused=True),
    "nadam-loop": lambda p: NAdam(p, lr=0.02, foreach=False, weight_decay=0.1, decoupled_weight_decay=True),
    "rmsprop-foreach": lambda p: RMSprop(p, lr=0.02, momentum=0.5, foreach=True),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def loss_of(net: nn.Module, weights: dict[str, Tensor], minibatch: int) -> Tensor:
    torch.manual_seed(100 + minibatch)
    value: Tensor = functional_call(net, weights, (torch.randn(4, 5, dtype=torch.float64),)).square().mean()
    return value


def with_versions(depth: int, optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> tuple[nn.Module, WeightVersions]:
    net = model()
    parameters = list(net.parameters())
    versions = WeightVersions(dict(net.named_parameters()))
    stepper = optimizer(parameters)
    losses = {i: loss_of(net, dict(versions.acquire(i)), i) for i in range(depth)}

    for i in range(MINIBATCHES):
        losses.pop(i).backward()
        gradients = versions.release(i)
        for name, parameter in net.named_parameters():
            parameter.grad = gradients[name]
        versions.update(parameters, stepper.step)
        if i + depth < MINIBATCHES:
            losses[i + depth] = loss_of(net, dict(versions.acquire(i + depth)), i + depth)
        assert versions.live <= depth
    return net, versions


def with_copies(depth: int, optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> nn.Module:
    """The formula, literally: minibatch i differentiates the copy made after max(0, i - depth + 1) updates."""
    net = model()
    stepper = optimizer(list(net.parameters()))
    history = [{name: p.detach().clone() for name, p in net.named_parameters()}]
    for i in range(MINIBATCHES):
        used = {name: p.clone().requires_grad_() for name, p in history[max(0, i - depth + 1)].items()}
        loss_of(net, used, i).backward()
        for name, parameter in net.named_parameters():
            parameter.grad = used[name].grad
        stepper.step()
        history.append({name: p.detach().clone() for name, p in net.named_parameters()})
    return net


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_equal_to_explicit_copies(name: str) -> None:
    for depth in (1, 2, 3):
        net, versions = with_versions(depth, OPTIMIZERS[name])
        assert (versions.number, versions.live) == (MINIBATCHES, 1)
        for one, other in zip(net.parameters(), with_copies(depth, OPTIMIZERS[name]).parameters(), strict=True):
            assert torch.equal(one, other)


def test_only_what_changes_is_copied_and_its_memory_comes_back() -> None:
    """A version without minibatches in flight is updated in place."""
    moving, frozen = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3), requires_grad=False)
    versions, addresses = WeightVersions({"moving": moving, "frozen": frozen}), {moving.data_ptr()}
    versions.acquire(0)
    versions.release(0)
    for minibatch in range(1, 7):
        versions.update([moving], lambda: moving.data.add_(1))
        addresses.add(moving.data_ptr())
        assert len(addresses) == (1 if minibatch == 1 else 2)
        assert torch.equal(versions.acquire(minibatch)["moving"], torch.full((3,), 1.0 + minibatch))
        assert versions.leaves_of(minibatch)["frozen"].data_ptr() == frozen.data_ptr()
        if minibatch > 1:
            versions.release(minibatch - 1)


def test_memory_shared_by_two_versions_outlives_the_newer_one() -> None:
    first, second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    versions = WeightVersions({"first": first, "second": second})
    held = versions.acquire(0)
    versions.update([first], lambda: first.data.fill_(1))  # version 1 shares `second` with version 0
    versions.acquire(1)
    versions.update([second], lambda: second.data.fill_(2))
    versions.release(1)  # out of order: version 0 still reads the old memory of `second`
    versions.acquire(2)
    versions.update([first, second], lambda: (first.data.fill_(3), second.data.fill_(3)))
    assert torch.equal(held["first"], torch.zeros(2))
    assert torch.equal(held["second"], torch.zeros(2))


def test_tied_parameters_share_one_leaf() -> None:
    tied = nn.Parameter(torch.ones(2))
    versions = WeightVersions({"a": tied, "b": tied})
    weights = versions.acquire(0)
    assert weights["a"] is weights["b"]
    (weights["a"] * weights["b"]).sum().backward()
    assert torch.equal(versions.release(0)["a"], torch.full((2,), 2.0))
