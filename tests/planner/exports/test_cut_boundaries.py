"""Cuts by naming modules, and sets of cuts that are possible together: against torch's own cuts and by brute force."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from decoders import chain, decoder, grid, problem

from pipeplan.errors import InputError
from pipeplan.exports.layer_chains import ModuleBoundaries, ModuleSplit, chain_of, compatible_places, cut_places
from pipeplan.exports.megatron import TARGET as MEGATRON
from pipeplan.exports.module_stacks import stack_of
from pipeplan.exports.torch_pipelining import TARGET
from pipeplan.problem.options import Options
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.profiler import profile_model


def layered(*layers: tuple[str, str]) -> Profile:
    """A chain of layers from pairs of a layer and the path of its module."""
    names = [name for name, _ in layers]
    made = tuple(Layer(name, 1.0, 1.0, 0, 0, module=module, op=name) for name, module in layers)
    tensors = tuple(Tensor(one, one, (other,), 8, 8) for one, other in itertools.pairwise(names))
    return Profile(made, tensors, 1)


def test_a_boundary_is_where_a_module_that_is_called_once_begins_or_ends() -> None:
    profile = layered(
        ("conv", "conv"),
        ("relu", ""),  # an operator of the model's own forward()
        ("tanh", ""),
        ("block.mul", "block"),  # an operator of a module's forward()
        ("block.fc", "block.fc"),
        ("block.add", "block"),
        ("act", "act"),  # called twice
        ("head", "head"),
        ("act#2", "act"),
        ("loss", ""),
    )
    assert ModuleBoundaries(profile).splits == {
        1: ModuleSplit("conv", before=False),
        3: ModuleSplit("block", before=True),
        4: ModuleSplit("block.fc", before=True),
        5: ModuleSplit("block.fc", before=False),
        6: ModuleSplit("block", before=False),
        7: ModuleSplit("head", before=True),
        8: ModuleSplit("head", before=False),
    }
    inside = [("b.fc", "b.fc"), ("b.add", "b")]
    twice = layered(("in", "in"), *inside, *((f"{name}#2", module) for name, module in inside), ("out", "out"))
    assert ModuleBoundaries(twice).splits == {1: ModuleSplit("in", before=False), 5: ModuleSplit("out", before=True)}


@pytest.mark.parametrize(
    "name", [pytest.param("mnist", marks=pytest.mark.deploy), pytest.param("resnet-tiny", marks=pytest.mark.slow)]
)
def test_torch_cuts_where_the_profile_says(name: str) -> None:
    """torch's `pipeline()` puts the modules before each boundary of a traced model into the first stage."""
    pytest.importorskip("torch")
    from torch.distributed.pipelining import SplitPoint, pipeline

    from pipeplan_launch.job.loading import load_job
    from pipeplan_launch.tracing.trace import trace_job

    job = load_job(name, 0)
    traced = trace_job(job, 2)
    layers = tuple(Layer(one.name, 1.0, 1.0, 0, 0, module=one.module, op=one.op) for one in traced.layers)
    boundaries = ModuleBoundaries(Profile(layers, (), 2))
    assert boundaries.splits
    for place, split in list(boundaries.splits.items())[:: 1 if name == "mnist" else 7]:
        point = SplitPoint.BEGINNING if split.before else SplitPoint.END
        fresh = load_job(name, 0)
        pipe = pipeline(fresh.model, fresh.example_inputs(2), split_spec={split.module: point})
        held = [{key for key, _ in pipe.get_stage_module(stage).named_parameters()} for stage in range(2)]
        before = {key for one in traced.layers[:place] for key in one.parameters}
        assert held[0] == before, f"at {split}"
        assert held[1] == {key for one in traced.layers[place:] for key in one.parameters}


def random_profile(seed: int) -> Profile:
    """A random DAG with one module for each layer, and connections that skip some layers."""
    rng = random.Random(seed)
    count = rng.randint(3, 8)
    tensors = []
    for source in range(count - 1):
        targets = {source + 1} | {other for other in range(source + 2, count) if rng.random() < 0.15}
        tensors.append(Tensor(f"t{source}", f"m{source}", tuple(f"m{other}" for other in sorted(targets)), 8, 8))
    layers = tuple(Layer(f"m{index}", 1.0, 1.0, 0, 0, module=f"m{index}") for index in range(count))
    return Profile(layers, tuple(tensors), 4)


def skips_a_stage(profile: Profile, cuts: Sequence[int]) -> bool:
    """Whether a tensor skips a stage."""
    stage = {layer.name: sum(place <= index for place in cuts) for index, layer in enumerate(profile.layers)}
    return any(stage[reader] > stage[one.producer] + 1 for one in profile.tensors for reader in one.consumers)


def test_plans_are_refused_if_a_tensor_skips_a_stage() -> None:
    for seed in range(30):
        profile = random_profile(seed)
        boundaries, posed = ModuleBoundaries(profile), problem(profile)
        names = [layer.name for layer in profile.layers]
        free = compatible_places(boundaries, Options())
        for cuts in itertools.chain.from_iterable(itertools.combinations(boundaries.splits, n) for n in (1, 2, 3)):
            plan = grid(profile, [names[place] for place in cuts])
            if skips_a_stage(profile, cuts):
                assert not set(cuts) <= set(free), "the restriction allows cuts that exclude each other"
                with pytest.raises(InputError, match=r"skips stage \d"):
                    cut_places(TARGET, boundaries, posed, plan)
            else:
                assert cut_places(TARGET, boundaries, posed, plan) == list(cuts)
        assert free, "every model can be cut once"


def test_blocks_of_a_decoder_are_cut_apart_and_inside_them_only_once() -> None:
    names, boundaries = [layer.name for layer in decoder(3).layers], ModuleBoundaries(decoder(3))
    found = [names[place] for place in compatible_places(boundaries, Options())]
    assert found == ["h.0.ln", "h.1.ln", "h.2.ln", "ln_f", "lm_head"]
    assert compatible_places(boundaries, Options(max_stages=2)) == sorted(boundaries.splits)
    assert len(boundaries.splits) > len(found)


def test_layers_that_read_no_other_are_in_the_first_stage() -> None:
    """The model reads a second input in the middle, and torch gives inputs to the first stage only."""
    profile = chain(["a", "b", "embed", "c", "d", "loss"])
    kept = [one for one in profile.tensors if one.producer != "b"]
    tensors = (*kept, Tensor("b", "b", ("c",), 64, 64))
    names = [layer.name for layer in profile.layers]
    boundaries = ModuleBoundaries(replace(profile, tensors=tensors))
    assert [names[place] for place in compatible_places(boundaries, Options())] == ["c", "d"]


def test_models_that_cannot_be_cut_by_modules_are_refused() -> None:
    unnamed = layered(("a", ""), ("b", ""), ("loss", ""))
    with pytest.raises(InputError, match="does not name the modules of its layers"):
        TARGET.restrict(unnamed, Options(accumulate=2))
    late = chain(["a", "b", "loss"])
    late = replace(late, tensors=(Tensor("b", "b", ("loss",), 8, 8), Tensor("a", "a", ("loss",), 8, 8)))
    with pytest.raises(InputError, match="a tensor would skip a stage"):
        TARGET.restrict(late, Options(accumulate=2))


def profiled(folder: Path, model: str, granularity: str) -> Profile:
    (folder / "jobs.py").write_text(f"from traced_zoo_hf import build\n\ndef job():\n    return build({model!r})\n")
    return profile_model(f"{folder}/jobs.py:job", ProfilerOptions(repeats=1, batches=(2,), granularity=granularity))


@pytest.mark.slow
def test_language_models_are_stacks_and_chains(tmp_path: Path) -> None:
    for model, granularity, path, embedding in (
        ("llama", "layer", "model.layers", "model.embed_tokens"),
        ("llama", "module", "model.layers", "model.embed_tokens"),
        ("gpt2", "layer", "transformer.h", "transformer.wte"),
    ):
        profile = profiled(tmp_path, model, granularity)
        stack = stack_of(profile)
        assert (stack.path, len(stack.blocks), stack.after[-1]) == (path, 2, "loss")
        assert (embedding in stack.before, "lm_head" in stack.after) == (True, True)
        labels = [item.label for item in chain_of(profile)]
        assert labels == [embedding, *labels[1:-1], "lm_head"]
        assert [label for label in labels if label.startswith(path)] == [f"{path}.{number}" for number in range(2)]
    with pytest.raises(InputError, match=r"transformer\.wte and lm_head share their weights"):
        MEGATRON.restrict(profiled(tmp_path, "gpt2-tied", "module"), Options(accumulate=4))
