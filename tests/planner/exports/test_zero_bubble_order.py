"""The order of passes of zb-h1 as torch's own schedules read it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeplan.exports.uniform_degrees import order_csv
from pipeplan.plan.plan import Plan, Stage


def test_torch_reads_the_order_of_inputs_and_weights() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    stages = [Stage(("a",), (0,), 2, 1), Stage(("b",), (1,), 1, 1, deferred=1)]
    plan = Plan(tuple(stages), schedule="zb-h1", accumulate=3)
    rows = [row.split(",") for row in order_csv(plan).split()]
    assert rows == [
        ["0F0", "0F1", "0B0", "0F2", "0B1", "0B2"],
        ["1F0", "1I0", "1F1", "1I1", "1W0", "1F2", "1I2", "1W1", "1W2"],
    ]
    for row in rows:
        assert [str(schedules._Action.from_str(one)) for one in row] == row
    whole = replace(plan, stages=tuple(replace(stage, deferred=0) for stage in stages))
    assert not set(order_csv(whole)) & {"I", "W"}
