"""Messages within one worker's view: tags, order, and what a lost peer looks like."""

from __future__ import annotations

import itertools

from pipeplan_launch.transport import Direction, _tag


def test_tags_of_messages_under_way_differ() -> None:
    """Activations of three tensors forward, gradients of two back."""
    tags = [
        _tag(direction, minibatch, index, count)
        for direction, count in ((Direction.ACTIVATIONS, 3), (Direction.GRADIENTS, 2))
        for minibatch, index in itertools.product(range(1000), range(count))
    ]
    assert len(set(tags)) == len(tags)
    assert all(0 <= tag < 2**31 for tag in tags)
    assert 0 <= _tag(Direction.GRADIENTS, 2**40, 1, 2) < 2**31
