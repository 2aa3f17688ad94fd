"""An optimiser's state survives as plain data, and goes to the optimisers of other stages by parameter name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from saved import latest, save
from torch import Tensor, nn
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RMSprop, Rprop

from pipeplan_launch.checkpoint import optimizer_state, tensor_store
from pipeplan_launch.errors import LaunchError

Parameters = dict[str, nn.Parameter]
Make = Callable[[Iterable[Any]], Optimizer]
SIZES = {"a": 2, "b": 3, "c": 4, "a.b": 2}


class HighPrecision(SGD):
    """Keeps a moment in more digits than the parameter has, and other things that are no tensors."""

    def step(self, _closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("moment", torch.zeros_like(parameter, dtype=torch.float64)).add_(parameter.grad)
                steps, _ = state.get("note", (0, None))
                state["note"] = (steps + 1, {"infinite": float("inf"), "last": [torch.tensor([1, 2])]})
                with torch.no_grad():
                    parameter.sub_(0.01 * state["moment"] / (steps + 1))


MAKE: dict[str, Make] = {
    "own": lambda p: HighPrecision(p, lr=0.1),
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: AdamW(p, lr=0.1, fused=True),
    "amsgrad": lambda p: Adam(p, lr=torch.tensor(0.1), amsgrad=True),
    "nadam": lambda p: NAdam(p, lr=0.1),
    "rmsprop": lambda p: RMSprop(p, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda p: Adagrad(p, lr=0.1),
    "adadelta": lambda p: Adadelta(p, lr=0.1),
    "adamax": lambda p: Adamax(p, lr=0.1),
    "asgd": lambda p: ASGD(p, lr=0.1),
    "rprop": lambda p: Rprop(p, lr=0.1),
}


def weights(names: Iterable[str] = SIZES, dtype: torch.dtype = torch.float32) -> Parameters:
    return {name: nn.Parameter(torch.linspace(-1, 1, SIZES[name], dtype=dtype)) for name in names}


def step(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter], count: int = 3) -> None:
    for number in range(count):
        for name, parameter in parameters.items():
            parameter.grad = torch.full_like(parameter, (len(name) + number) * 0.3) + parameter.detach()
        optimizer.step()


def through_disk(
    run: Path, stages: Sequence[tuple[Optimizer, Parameters]]
) -> tuple[dict[str, Any], optimizer_state.TensorLoader]:
    """What a checkpoint holds of the stages' optimisers, and how to load its tensors."""
    tensors: dict[str, Tensor] = {}
    parts = []
    for optimizer, parameters in stages:
        content, mine = optimizer_state.optimizer_state(optimizer, parameters)
        parts.append(content)
        assert not tensors.keys() & mine.keys()
        tensors |= mine
    save(run, tensors or {"nothing": torch.zeros(1)}, optimizer=optimizer_state.merge_optimizer_states(parts))
    manifest = latest(run)
    return manifest.optimizer, lambda names: tensor_store.load_tensors(manifest, list(names))


def loaded(optimizer: Optimizer | None, parameters: Parameters, saved: Any, **own: Any) -> Any:
    optimizer_state.load_optimizer(optimizer, parameters, *saved, "there", **own)
    return optimizer


ALL = ["a", "b", "c", "a.b"]


@pytest.mark.parametrize("kind", MAKE)
def test_it_goes_on_bit_by_bit_under_any_cut(tmp_path: Path, kind: str) -> None:
    cuts = (
        ([ALL], [ALL]),
        ([["a", "b"], ["c", "a.b"]], [["a"], ["b", "c", "a.b"]]),
        ([["a"], ["b"], ["c"], ["a.b"]], [["a.b", "c", "b", "a"]]),
        ([ALL], [["a"], ["b", "c"], ["a.b"]]),
    )
    for number, sides in enumerate(cuts):
        ours, theirs = (
            [(MAKE[kind](parameters.values()), parameters) for parameters in map(weights, side)] for side in sides
        )
        for optimizer, parameters in ours:
            step(optimizer, parameters)
        saved = through_disk(tmp_path / str(number), ours)
        trained = {name: one for _, parameters in ours for name, one in parameters.items()}
        found = {name: one for _, parameters in theirs for name, one in parameters.items()}
        with torch.no_grad():
            for name, parameter in found.items():
                parameter.copy_(trained[name])
        before, after = (
            {name: optimizer.state[one] for optimizer, parameters in side for name, one in parameters.items()}
            for side in (ours, [(loaded(*one, saved), one[1]) for one in theirs])
        )
        for name, state in before.items():
            assert {key: getattr(one, "dtype", one) for key, one in state.items() if key != "note"} == {
                key: getattr(one, "dtype", one) for key, one in after[name].items() if key != "note"
            }
        for optimizer, parameters in (*ours, *theirs):
            step(optimizer, parameters, 2)
        assert trained.keys() == found.keys()
        assert all(torch.equal(one, found[name]) for name, one in trained.items())


def two_rates(parameters: Parameters) -> Optimizer:
    own = [{"params": [parameters["a"]], "lr": 0.5, "momentum": 0.0}] if "a" in parameters else []
    rest = [one for name, one in parameters.items() if name != "a"]
    return SGD([{"params": rest}, *own], lr=0.1, momentum=0.9)


def test_groups_take_the_settings_of_their_members(tmp_path: Path) -> None:
    """As they were at the checkpoint, not as the job makes them now."""
    ours = [(two_rates(parameters), parameters) for parameters in (weights("ab"), weights("c"))]
    for optimizer, parameters in ours:
        step(optimizer, parameters)
    ours[0][0].param_groups[1]["lr"] = 0.25
    saved, parameters = through_disk(tmp_path, ours), weights("abc")
    other = loaded(two_rates(parameters), parameters, saved)
    kept = loaded(two_rates(parameters), parameters, saved, own={"lr"})
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.25]
    assert [len(group["params"]) for group in other.param_groups] == [2, 1]
    assert [group["lr"] for group in kept.param_groups] == [0.1, 0.5]


def test_members_with_different_settings_make_no_group(tmp_path: Path) -> None:
    ours = [(SGD((own := weights(name)).values(), lr=rate), own) for name, rate in (("a", 1.0), ("b", 2.0))]
    saved, parameters = through_disk(tmp_path, ours), weights("ab")
    with pytest.raises(LaunchError, match=r"'a' and 'b' into one group, and they were saved with 'lr' 1\.0 and 2\.0"):
        loaded(SGD(parameters.values(), lr=1.0), parameters, saved)
    loaded(SGD(parameters.values(), lr=1.0), parameters, saved, own={"lr"})


class Picky(SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        raise KeyError(f"no {len(state_dict['state'])}")


def test_another_optimiser_or_parameter_or_damage_is_refused(tmp_path: Path) -> None:
    ours = weights("a")
    saved = through_disk(tmp_path / "sgd", [(SGD(ours.values(), lr=0.1), ours)])
    picky = through_disk(tmp_path / "picky", [(Picky(ours.values(), lr=0.1), ours)])
    loaded(None, {}, saved)
    adamw = MAKE["adamw"](ours.values())
    step(adamw, ours)
    whole, load = through_disk(tmp_path / "adamw", [(adamw, ours)])
    cases: list[Any] = [
        (MAKE["adamw"], "a", saved, "saved with the optimiser SGD, and the job's is AdamW now"),
        (MAKE["sgd"], "ab", saved, "no optimiser settings for 'b', which its run did not train"),
        (Picky, "a", picky, "the job's optimizer, which takes its saved state, failed: KeyError: 'no 0'"),
    ]
    for bad in ({"tensor": "absent"}, {"tuple": 3}, {"float": "1"}, {"x": 1}, {}, {"tuple": [], "dict": {}}):
        changed = json.loads(json.dumps(whole))
        changed["state"]["a"]["step"] = bad
        cases.append((MAKE["adamw"], "a", (changed, load), r"has no 'absent'|the optimiser's state is damaged"))
    for make, names, given, says in cases:
        parameters = weights(names)
        with pytest.raises(LaunchError, match=says):
            loaded(make(parameters.values()), parameters, given)


def test_a_parameter_without_state_has_none(tmp_path: Path) -> None:
    ours, theirs = weights("ab"), weights("ab")
    optimizer = MAKE["adamw"](ours.values())
    step(optimizer, {"a": ours["a"]})
    other = loaded(MAKE["adamw"](theirs.values()), theirs, through_disk(tmp_path, [(optimizer, ours)]))
    assert set(other.state) == {theirs["a"]}
    assert other.state[theirs["a"]]["step"].dtype == torch.float32


def test_what_a_checkpoint_cannot_hold_is_refused() -> None:
    parameters = weights()
    optimizer = SGD(parameters.values(), lr=0.1)
    optimizer.param_groups[0]["schedule"] = lambda: 0
    with pytest.raises(LaunchError, match="the optimiser's 'schedule' is a function, which a checkpoint cannot hold"):
        optimizer_state.optimizer_state(optimizer, parameters)
    optimizer = SGD(parameters.values(), lr=0.1)
    optimizer.state["global"]["count"] = 1  # type: ignore[index]
    with pytest.raises(LaunchError, match="SGD keeps state that belongs to no parameter"):
        optimizer_state.optimizer_state(optimizer, parameters)


def test_values_come_back_as_they_were() -> None:
    for value in (None, True, 0, -1.5, float("-inf"), "x", (1, (2, [3])), [], (), {"a": {"b": (None,)}}):
        tensors: dict[str, Tensor] = {}
        encoded = optimizer_state.encode_value({"value": value, "tensor": torch.ones(2)}, "name", tensors)
        encoded = json.loads(json.dumps(encoded, allow_nan=False))
        assert list(optimizer_state.tensor_names_in(encoded)) == ["name.tensor"] == list(tensors)
        decoded = optimizer_state.decode_value(encoded, tensors)
        assert (decoded["value"], type(decoded["value"])) == (value, type(value))
        assert torch.equal(decoded["tensor"], torch.ones(2))
