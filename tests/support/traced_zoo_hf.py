"""Models of Hugging Face transformers, as their authors wrote them, small, built from a config."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan_launch import Job

WORDS = 60
DECODER = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "attention_dropout": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def hf() -> Any:
    """The library, whose import takes a second of every process that collects tests."""
    import transformers

    return transformers


def words(samples: int, length: int = 7) -> Tensor:
    return torch.randint(3, WORDS, (samples, length))


def _ids(samples: int) -> Mapping[str, Tensor]:
    return {"input_ids": words(samples)}


def _masked(samples: int) -> Mapping[str, Tensor]:
    return {**_padded(samples), "token_type_ids": words(samples) % 2}


def _padded(samples: int) -> Mapping[str, Tensor]:
    mask = torch.ones(samples, 7, dtype=torch.int64)
    mask[::2, 5:] = 0
    return {"input_ids": words(samples), "attention_mask": mask}


def _pairs(samples: int) -> Mapping[str, Tensor]:
    return {"input_ids": words(samples), "decoder_input_ids": words(samples, 5)}


def _labelled(samples: int) -> Mapping[str, Tensor]:
    ids = words(samples)
    return {"input_ids": ids, "labels": ids}


def next_word(output: Any, target: Any) -> Tensor:
    """The mean of a cross-entropy against fixed words."""
    scores = output.logits.flatten(0, 1)
    return functional.cross_entropy(scores.float(), torch.arange(len(scores), device=scores.device) % WORDS)


def own_loss(output: Any, target: Any) -> Tensor:
    """The one that the model computes itself, given labels."""
    return output.loss


def gpt2(*, tied: bool = False) -> nn.Module:
    config = hf().GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=16,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=tied,
    )
    return hf().GPT2LMHeadModel(config)


def gpt2_tied() -> nn.Module:
    return gpt2(tied=True)


def llama() -> nn.Module:
    return hf().LlamaForCausalLM(hf().LlamaConfig(**DECODER))


def bert() -> nn.Module:
    config = hf().BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=16,
        tie_word_embeddings=False,
    )
    return hf().BertForMaskedLM(config)


def t5() -> nn.Module:
    config = hf().T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
    )
    model = hf().T5ForConditionalGeneration(config)
    # Tied, it has one weight at both ends, and so one stage.
    model.lm_head.weight = nn.Parameter(torch.randn(WORDS, 16) * 0.1)
    return model


def mixtral() -> nn.Module:
    return hf().MixtralForCausalLM(hf().MixtralConfig(**DECODER, num_local_experts=4, router_jitter_noise=0.1))


def mixtral_eager() -> nn.Module:
    """With experts that loop over those that got a token, which depends on the data."""
    return hf().MixtralForCausalLM(hf().MixtralConfig(**DECODER, num_local_experts=4, experts_implementation="eager"))


def qwen() -> nn.Module:
    return hf().Qwen2MoeForCausalLM(
        hf().Qwen2MoeConfig(
            **DECODER,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=12,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )


ZOO: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Mapping[str, Tensor]], Any]] = {
    "gpt2": (gpt2, _ids, next_word),
    "gpt2-tied": (gpt2_tied, _labelled, own_loss),
    "llama": (llama, _ids, next_word),
    "llama-masked": (llama, _padded, next_word),
    "bert": (bert, _masked, next_word),
    "t5": (t5, _pairs, next_word),
    "mixtral": (mixtral, _ids, next_word),
    "mixtral-eager": (mixtral_eager, _ids, next_word),
    "qwen": (qwen, _ids, next_word),
}


def build(name: str) -> Job:
    """The model of that name, with the same weights every time."""
    make, inputs, loss = ZOO[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = make()
    return Job(model, inputs=inputs, loss=loss)
