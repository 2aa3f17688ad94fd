"""The export to DeepSpeed: the models and plans that it accepts, and the cuts of its module in a list of layers."""

from __future__ import annotations

import itertools
import json
import re
import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoders import chain, decoder, grid, problem, refusal
from torch import nn

from pipeplan.errors import InputError
from pipeplan.exports.deepspeed import CONFIG, HOSTS, MODULE, TARGET
from pipeplan.exports.layer_chains import chain_of
from pipeplan.exports.target import export_files
from pipeplan.plan.plan import Plan
from pipeplan.plan.schedules import GPIPE, STASHING
from pipeplan.planning.solve import solve
from pipeplan.problem.options import Options
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.util import files as resources

DECODER = decoder(4)


def bundled(name: str) -> Profile:
    return Profile.load(resources.bundled_folder("profiles") / f"{name}-v100.json")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a generated module with stand-ins for DeepSpeed's classes."""

    class Without:
        def __init__(self, *_: object, **__: object) -> None:
            raise AssertionError("this is not DeepSpeed")

    wanted = {
        "deepspeed": {},
        "deepspeed.pipe": {"LayerSpec": Without, "PipelineModule": Without},
        "deepspeed.runtime": {},
        "deepspeed.runtime.activation_checkpointing": {},
        "deepspeed.runtime.activation_checkpointing.checkpointing": {"non_reentrant_checkpoint": None},
        "deepspeed.runtime.pipe": {},
        "deepspeed.runtime.pipe.topology": {"PipeDataParallelTopology": Without},
    }
    for name, content in wanted.items():
        made = types.ModuleType(name)
        vars(made).update(content)
        monkeypatch.setitem(sys.modules, name, made)

    def run(made_of: Problem, plan: Plan) -> dict[str, Any]:
        found: dict[str, Any] = {}
        exec(compile(export_files(TARGET, made_of, plan)[MODULE].text, MODULE, "exec"), found)
        return found

    return run


def test_a_chain_can_be_cut_between_all_of_its_layers() -> None:
    found = chain_of(bundled("vgg16"))
    assert [item.label for item in found] == [
        *(f"features.{n}" for n in range(31)),
        *(f"classifier.{n}" for n in range(7)),
    ]
    assert found[-1].layers == ("classifier.6", "loss"), "DeepSpeed computes the loss behind its last layer"


def test_blocks_stay_whole_and_branches_together() -> None:
    assert [item.label for item in chain_of(DECODER)] == ["wte", "h.0", "h.1", "h.2", "h.3", "ln_f", "lm_head"]
    assert [item.label for item in chain_of(bundled("gnmt8"))] == ["encoder.embedding", "decoder.classifier"]
    assert "word" in chain_of(bundled("s2vt"))[0].layers, "the words are read by the first stage too"


def test_outputs_without_a_gradient_may_cross_and_are_named() -> None:
    profile = decoder(3, rotary=True)
    assert {item.beside for item in chain_of(profile)} == {(), ("rotary",)}
    text = export_files(TARGET, problem(profile), grid(profile, ["h.1.ln"]))[MODULE].text
    assert "# Later stages also read outputs that need no gradient: rotary." in text


def test_an_output_with_a_gradient_that_passes_every_cut_leaves_no_chain() -> None:
    names = ["a", "b", "c", "d", "loss"]
    far = Tensor("far", "a", ("d", "loss"), 8, 8)
    profile = replace(chain(names), tensors=(*chain(names).tensors, far))
    assert [item.layers for item in chain_of(profile)] == [("a",), ("b", "c", "d", "loss")]
    with pytest.raises(InputError, match=r"after b the outputs of (a and b|b and a) cross"):
        TARGET.restrict(
            replace(profile, tensors=(*profile.tensors, Tensor("more", "a", ("c",), 8, 8)), together=(("a", "b"),)),
            Options(accumulate=8),
        )
    with pytest.raises(InputError, match="a and d must share a stage"):
        TARGET.restrict(replace(chain(names), together=(("a", "d"),)), Options(accumulate=8))


def test_every_plan_under_the_restriction_can_be_expressed(module: Any) -> None:
    for profile, stages in itertools.product((DECODER, chain(["a", "b", "c", "d", "loss"])), (1, 3)):
        options = TARGET.restrict(profile, Options(accumulate=8, stages=stages))
        outcome = solve(problem(profile, options=options))
        found = module(outcome.problem, outcome.plan)
        names = [item.label for item in chain_of(profile)]
        assert len(found["parts_of"](names)) == stages + 1


def test_the_module_cuts_a_list_where_the_plan_says(module: Any) -> None:
    found = module(problem(DECODER), grid(DECODER, ["h.1.ln", "ln_f"]))
    assert (found["STAGES"], found["REPLICAS"]) == (3, 1)
    cut = found["parts_of"]
    assert cut(["wte", "", "h.0", "h.1", "h.2", "h.3", "", "ln_f", "lm_head"]) == [0, 3, 7, 9]
    with pytest.raises(ValueError, match=r"one called 'ln_f'"):
        cut(["wte", "h.0", "h.1", "h.2", "h.3"])
    with pytest.raises(ValueError, match="in this order"):
        cut(["wte", "ln_f", "h.1"])
    with pytest.raises(ValueError, match="in this order"):
        cut(["h.1", "ln_f"])


def test_a_sequential_gives_its_layers_with_their_names(module: Any) -> None:
    model = nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.ReLU(), nn.Linear(2, 2), nn.Linear(2, 2)), nn.Sequential(nn.Tanh())
    )
    profile = chain(["0", "1.0", "1.1", "1.2", "2.0", "loss"])
    profile = replace(
        profile, layers=(*profile.layers[:4], replace(profile.layers[4], parameter_bytes=0), profile.layers[5])
    )
    found = module(problem(profile), grid(profile, ["1.2"]))
    layers = found["layers_of"](model)
    assert [name for name, _ in layers] == ["0", "1.0", "1.1", "1.2", "2"]
    point = torch.ones(1, 2)
    value = point
    for _, layer in layers:
        value = layer(value)
    assert torch.equal(value, model(point))
    assert found["parts_of"]([name for name, _ in layers]) == [0, 3, 5]


def test_the_configuration_has_the_sizes_of_the_grid() -> None:
    plan = grid(DECODER, ["h.2.ln"], replicas=4, accumulate=12)
    files = export_files(TARGET, problem(DECODER, servers=2), plan)
    config = json.loads(files[CONFIG].text)
    assert config == {"train_batch_size": 48, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 3}
    hosts = [line for line in files[HOSTS].text.splitlines() if not line.startswith("#")]
    assert hosts == ["server0 slots=4", "server1 slots=4"]


def test_single_stages_recompute(module: Any) -> None:
    plan = grid(DECODER, ["h.2.ln"])
    again = replace(plan, stages=(replace(plan.stages[0], recompute=True), plan.stages[1]))
    assert module(problem(DECODER), again)["RECOMPUTE"] == (True, False)
    config = json.loads(export_files(TARGET, problem(DECODER), again)[CONFIG].text)
    assert config["pipeline"] == {"use_reentrant": False}


def test_plans_that_deepspeed_cannot_express_are_refused() -> None:
    for plan, reason in (
        (grid(DECODER, ["h.2.attn"]), r"stage 1 holds a part of h\.2 only.*solve … --for deepspeed"),
        (grid(DECODER, ["loss"]), "stage 1 holds a part of lm_head only"),
        (grid(DECODER, ["h.2.ln"], schedule=STASHING, accumulate=None), "asynchronous"),
        (grid(DECODER, ["h.2.ln"], schedule=GPIPE), "has no schedule gpipe"),
        (grid(DECODER, ["h.2.ln"], replicas=2, accumulate=7), "7 minibatches"),
    ):
        assert re.search(reason, refusal(TARGET, problem(DECODER), plan))


def test_names_cannot_break_the_module(module: Any) -> None:
    evil = "x\"\"\"'''\\\n#{{ 1 }}\u2028"
    profile = replace(chain(["first", evil, "last", "loss"]), model_name=evil)
    found = module(problem(profile), grid(profile, [evil]))
    assert found["STARTS"] == ("", evil)
    assert found["parts_of"](["first", evil, "last"]) == [0, 1, 3]
