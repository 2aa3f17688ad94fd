"""The arguments that describe a problem, as every command that solves one takes them."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from commandline import Run, check_refusals

from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile

LAYERS = "abcdef"
CLUSTER = ("--cluster", "A", "--servers", "1")
"""Four workers: what options do is seen on few as well."""


@pytest.fixture(autouse=True)
def profile(run: Run) -> None:
    """Six equal layers, gradients too large to replicate."""
    Profile(
        layers=tuple(Layer(name, 0.1, 0.2, 10**9, 10**6) for name in LAYERS),
        tensors=tuple(
            Tensor(f"{one}-{other}", one, (other,), 10**4, 10**4) for one, other in itertools.pairwise(LAYERS)
        ),
        minibatch=4,
        model_name="small",
    ).save(Path("profile.json"))


def solved(run: Run, *arguments: str) -> dict[str, Any]:
    named = () if "--schedule" in arguments else ("--schedule", "1f1b-stashing")
    done = run("solve", *CLUSTER, "--solver", "dp", "--no-write", "--json", *named, *arguments)
    assert done.code == 0, done.err
    document: dict[str, Any] = json.loads(done.out)
    return document


def stages(document: dict[str, Any]) -> list[str]:
    return ["".join(stage["layers"]) for stage in document["plan"]["stages"]]


def test_layers_may_be_pinned_and_kept_together(run: Run) -> None:
    assert "c" not in stages(solved(run))[0]
    pinned = stages(solved(run, "--pin", "c=1", "--pin", "e=2"))
    assert ("c" in pinned[0], "e" in pinned[1]) == (True, True)
    assert any("bcd" in stage for stage in stages(solved(run, "--together", "b, c", "--together", "c,d")))


def test_numbers_of_stages_and_workers_have_a_maximum(run: Run) -> None:
    for text, least, most in (("3", 3, None), ("1-4", None, 4), ("1-1", 1, None)):
        document = solved(run, "--stages", text, "--ignore-memory")
        assert (document["options"]["stages"], document["options"]["max_stages"]) == (least, most)
        assert len(stages(document)) == least if least else len(stages(document)) <= (most or 0)
    document = solved(run, "--max-workers", "3", "--max-replicas", "2", "--no-recompute")
    workers = [len(stage["workers"]) for stage in document["plan"]["stages"]]
    assert (sum(workers) <= 3, max(workers) <= 2, document["options"]["recompute"]) == (True, True, False)


def test_staleness_is_a_number_of_updates_or_any(run: Run) -> None:
    for text, stored in (("0", 0), ("2", 2), ("ANY", None)):
        done = run("solve", *CLUSTER, "--solver", "dp", "--no-write", "--json", "--staleness", text)
        document = json.loads(done.out)
        assert document["choice"]["staleness"] == stored
        assert text == "ANY" or max(document["updates"]["stale_by"]) <= int(text)


def test_schedules_with_a_number_of_minibatches(run: Run) -> None:
    for name in ("2bw", "gpipe", "1f1b-flush"):
        document = solved(run, "--schedule", name, "--batch", "48")
        assert (document["plan"]["schedule"], document["plan"]["accumulate"]) == (name, 12)
    # A microbatch of 4 on each of 4 workers.
    assert solved(run, "--schedule", "2bw")["plan"]["accumulate"] == 4


@pytest.mark.slow
def test_a_plan_under_constraints_is_explained_under_them(run: Run) -> None:
    arguments = ("--pin", "c=1", "--together", "e,f", "--max-workers", "5", "--schedule", "2bw", "--batch", "48")
    assert run("solve", "--cluster", "A", "--solver", "dp", *arguments).code == 0
    done = run("explain", "plan", "--profile", "profile.json", "--samples", "0", "--json")
    assert done.code == 0, done.err
    document = json.loads(done.out)
    assert document["behind_best"] == 0
    assert document["best_config"] == document["plan"]["config"]


PIN = f"solve {' '.join(CLUSTER)} --solver dp --no-write --schedule 1f1b-stashing --ignore-memory --pin "
GIVEN = f"solve {' '.join(CLUSTER)} --solver dp --no-write "
REFUSED = {
    # Without a limit on memory it is the pins alone that leave no plan, whatever time there is to find out.
    f"{PIN} a": "--pin: expected a layer and a stage from 1 on, as in conv1=1, found 'a'",
    f"{PIN} =1": "--pin: expected",
    f"{PIN} a=0": "a stage from 1 on",
    f"{PIN} a=99": "no plan satisfies the constraints on 4 workers: 'a' is pinned to stage 99, and there can be",
    f"{PIN} a=2 --pin c=1": "'c' is pinned to stage 1 and 'a', which comes before it, to stage 2; relax --pin",
    f"{PIN} a=1 --pin a=2": "'a' is pinned to stage 1 and also to stage 2; relax --pin",
    f"{PIN} a=1 --pin b=2 --together a,b": "and 'b', which must be in the same stage, to stage 2; relax",
    f"{GIVEN} --together a,z": "the profile has no layer 'z'",
    f"{GIVEN} --max-workers 0": "the maximum of workers must be at least 1",
    f"{GIVEN} --max-replicas 0": "the maximum of replicas must be at least 1",
    f"{GIVEN} --inference --schedule gpipe": "--schedule is for training",
    f"{GIVEN} --inference --shard-optimizer": "inference has no optimiser",
    f"{GIVEN} --schedule gpipe --staleness 0": "--staleness chooses among schedules: leave it out with",
    f"{GIVEN} --for megatron --staleness 1": "--staleness chooses among schedules: leave it out with",
    **{f"{GIVEN} --stages '{text}'": "a number or a range" for text in ("two", "", "-3", "1-", "1-2-3", "1.5", "²")},
    **{f"{GIVEN} --stages {text}": "at least 1 stage, and the smaller number first" for text in ("0", "0-2", "4-1")},
    **{f"{GIVEN} --staleness '{text}'": f"or any, found {text!r}" for text in ("some", "-1", "1.5", "", "²")},
}


def test_what_cannot_be_meant_is_one_line(run: Run) -> None:
    check_refusals(run, REFUSED)
