"""Traced models of Hugging Face transformers are recognised as an embedding, blocks and a head."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeplan.errors import InputError
from pipeplan.exports.layer_chains import chain_of
from pipeplan.exports.megatron import TARGET
from pipeplan.exports.module_stacks import stack_of
from pipeplan.problem.options import Options
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.profiler import profile_model

pytestmark = pytest.mark.slow


def profiled(folder: Path, model: str, granularity: str) -> Profile:
    (folder / "jobs.py").write_text(f"from traced_zoo_hf import build\n\ndef job():\n    return build({model!r})\n")
    return profile_model(f"{folder}/jobs.py:job", ProfilerOptions(repeats=1, batches=(2,), granularity=granularity))


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
        TARGET.restrict(profiled(tmp_path, "gpt2-tied", "module"), Options(accumulate=4))
