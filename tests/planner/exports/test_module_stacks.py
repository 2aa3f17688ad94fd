"""Traced models of Hugging Face transformers are recognised as an embedding, blocks and a head."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pipeplan.errors import InputError
from pipeplan.exports.layer_chains import chain_of
from pipeplan.exports.megatron import TARGET
from pipeplan.exports.module_stacks import stack_of
from pipeplan.problem.options import Options
from pipeplan.profile_data.profile import Profile

pytestmark = pytest.mark.slow

JOBS = """
import torch, transformers
from torch.utils.data import Dataset
from pipeplan_launch import Data, Job


class Counting(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        ids = (torch.arange(16) + index) % 40
        return {"input_ids": ids, "labels": ids}


def job(model):
    return Job(model, loss=lambda output, batch: output.loss, data=lambda: Data(Counting()), minibatch=2)


def llama():
    sizes = dict(vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4)
    return job(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, eos_token_id=None, use_cache=False)))


def gpt2(tied=False):
    sizes = dict(vocab_size=40, n_embd=32, n_layer=3, n_head=4, n_positions=16, bos_token_id=None, eos_token_id=None)
    config = transformers.GPT2Config(**sizes, tie_word_embeddings=tied, use_cache=False)
    return job(transformers.GPT2LMHeadModel(config))


def tied():
    return gpt2(True)
"""


def profiled(folder: Path, name: str, granularity: str) -> Profile:
    (folder / "jobs.py").write_text(JOBS)
    command = [sys.executable, "-m", "pipeplan", "profile", f"jobs.py:{name}", "--repeats", "1"]
    subprocess.run(
        [*command, "--granularity", granularity, "-o", "profile.json"], cwd=folder, check=True, capture_output=True
    )
    return Profile.load(folder / "profile.json")


@pytest.mark.parametrize(
    ("name", "granularity", "path", "embedding"),
    [
        ("llama", "layer", "model.layers", "model.embed_tokens"),
        ("llama", "module", "model.layers", "model.embed_tokens"),
        ("gpt2", "layer", "transformer.h", "transformer.wte"),
    ],
)
def test_language_models_are_stacks_and_chains(
    name: str, granularity: str, path: str, embedding: str, tmp_path: Path
) -> None:
    profile = profiled(tmp_path, name, granularity)
    stack = stack_of(profile)
    assert (stack.path, len(stack.blocks), stack.after[-1]) == (path, 3, "loss")
    assert (embedding in stack.before, "lm_head" in stack.after) == (True, True)
    labels = [item.label for item in chain_of(profile)]
    assert labels == [embedding, *labels[1:-1], "lm_head"]
    assert [label for label in labels if label.startswith(path)] == [f"{path}.{number}" for number in range(3)]


def test_tied_embeddings_are_noticed(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"transformer\.wte and lm_head share their weights"):
        TARGET.restrict(profiled(tmp_path, "tied", "module"), Options(accumulate=4))
