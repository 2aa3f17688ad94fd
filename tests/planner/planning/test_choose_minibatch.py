"""`solve --minibatch auto`: the measured size with the most samples per second."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import Run

from pipeplan.profile_data.layers import Layer, Size, Tensor
from pipeplan.profile_data.profile import Profile


def profile(of_eight: float, of_sixteen: float) -> Profile:
    """Two layers, measured at 4, 8 and 16; without weights, so that data parallelism on all workers is best."""

    def layers(time_s: float) -> tuple[Layer, ...]:
        return (Layer("a", time_s, 2 * time_s, 0, 8), Layer("b", time_s, 2 * time_s, 0, 8))

    tensors = (Tensor("a", "a", ("b",), 8, 8),)
    sizes = (Size(8, layers(of_eight), tensors), Size(16, layers(of_sixteen), tensors))
    return Profile(layers(1.0), tensors, 4, model_name="sized", sizes=sizes)


def test_the_size_with_the_most_samples_per_second_is_taken(run: Run) -> None:
    profile(1.5, 4.0).save(Path("profile.json"))
    done = run("solve", "--cluster", "local", "--workers", "2", "--minibatch", "auto", "--json", "--no-write")
    assert done.code == 0
    document = json.loads(done.out)
    assert document["profile"]["minibatch"] == 8
    rates = re.findall(r"minibatch (\d+): ([\d.]+) samples/s", done.err)
    # Two workers, each 6 time units a minibatch: 2 / 6 of 4 samples, 2 / 9 of 8, 2 / 24 of 16.
    assert [(size, float(rate)) for size, rate in rates] == [("8", 1.778), ("4", 1.333), ("16", 1.333)]


@pytest.mark.parametrize(
    ("arguments", "chosen"),
    [
        ([], False),
        (["--minibatch", "16"], False),
        (["--minibatch", "auto"], True),
        (["--schedule", "auto", "--batch", "8", "--staleness", "none"], True),
    ],
    ids=["plain", "size", "minibatch", "schedule"],
)
def test_a_choice_by_one_solver_is_said_to_be_one(run: Run, arguments: list[str], chosen: bool) -> None:
    profile(1.5, 4.0).save(Path("profile.json"))
    done = run("solve", "--cluster", "local", "--workers", "2", "--no-write", *arguments)
    assert done.code == 0, done.err
    assert ("DP alone chose among these; no second solver cross-checked the choice" in done.err) is chosen


def test_each_size_is_the_same_problem_as_when_it_is_named(run: Run) -> None:
    profile(1.5, 2.0).save(Path("profile.json"))
    arguments = ["solve", "--cluster", "local", "--workers", "2", "--json", "--no-write", "--minibatch"]
    chosen, named = (json.loads(run(*arguments, size).out) for size in ("auto", "16"))
    assert chosen["plan"] == named["plan"]
    assert chosen["profile"] == named["profile"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--minibatch", "auto"], "chooses among measured sizes, and the profile has one, 4"),
        (["--minibatch", "many"], "--minibatch: expected a number of samples or auto, found 'many'"),
        (["--minibatch", "auto", "--schedule", "auto", "--batch", "8"], "leave out --minibatch auto"),
        (["--minibatch", "0"], "minibatch size must be at least 1"),
    ],
    ids=["one size", "word", "both auto", "zero"],
)
def test_what_cannot_be_chosen_is_one_line(run: Run, arguments: list[str], says: str) -> None:
    replace(profile(1.0, 1.0), sizes=()).save(Path("profile.json"))
    done = run("solve", "--cluster", "local", "--workers", "2", "--no-write", *arguments)
    assert done.code == 2
    assert says in done.err
    assert done.err.count("error:") == 1
