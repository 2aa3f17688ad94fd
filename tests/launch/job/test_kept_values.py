"""Values that Python code keeps are compared with what they were, and restored in place."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from pipeplan_launch.job.kept_values import Attributes, keep


class Meter:
    def __init__(self) -> None:
        self.total, self.recent = 0.0, [1.0]


CHANGES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "list": ([1, [2]], lambda value: value[1].append(3)),
    "deque": (deque([1, 2], maxlen=2), lambda value: value.append(3)),
    "dictionary": ({"a": {"b": 1}}, lambda value: value["a"].update(b=2)),
    "set": ({1}, lambda value: value.add(2)),
    "tuple": ((torch.zeros(2),), lambda value: value[0].add_(1)),
    "tensor": (torch.tensor([1.0, float("nan")]), lambda value: value.neg_()),
    "array": (numpy.arange(3), lambda value: value.put(0, 7)),
    "object": (Meter(), lambda value: value.recent.append(2.0)),
    "torch": (torch.Generator(), lambda value: torch.rand(1, generator=value)),
    "python": (random.Random(1), lambda value: value.random()),
    "numpy": (numpy.random.default_rng(1), lambda value: value.random()),
    "mersenne-twister": (numpy.random.Generator(numpy.random.MT19937(1)), lambda value: value.random()),
    "old-numpy": (numpy.random.RandomState(1), lambda value: value.rand()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen_and_undone(name: str) -> None:
    value, change = CHANGES[name]
    before = keep(value)
    assert before.same(keep(value))
    change(value)
    assert not before.same(keep(value))
    assert before.restore() is value
    assert before.same(keep(value))


class Model(nn.Module):
    seen = 0

    def __init__(self) -> None:
        super().__init__()
        self.log: list[int] = []


def test_attributes_are_changed_added_and_restored() -> None:
    model = Model()
    before = Attributes([model, Model])
    model.log.append(1)
    model.new, Model.seen = 2, 3
    assert [(one.owner, one.name) for one in before.changed()] == [(model, "log"), (Model, "seen"), (model, "new")]
    before.restore()
    assert before.changed() == []
    assert (model.log, Model.seen, hasattr(model, "new")) == ([], 0, False)
