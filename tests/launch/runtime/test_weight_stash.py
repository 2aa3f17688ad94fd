"""The memory of weight versions: what is copied, what is shared, what comes back. `test_semantics.py` has values."""

from __future__ import annotations

import torch
from torch import nn

from pipeplan_launch.runtime.weight_stash import WeightVersions

torch.set_num_threads(1)


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
        assert (versions.number, versions.live) == (minibatch, 1)


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
