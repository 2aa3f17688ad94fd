"""Models of the families that people train, in the sizes that they train, for `families.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan_launch import Job

WORDS = 32_000


def _transformers() -> Any:
    import transformers

    return transformers


def _mean(output: Any, target: Any) -> Tensor:
    """A loss over all scores, as large as a cross-entropy's, whatever the model calls them."""
    scores = output.logits if hasattr(output, "logits") else output
    return scores.float().logsumexp(-1).mean()


def _job(model: Callable[[], nn.Module], inputs: Callable[[int], Any], minibatch: int) -> Job:
    return Job(
        model(),
        inputs=inputs,
        loss=_mean,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-4),
        minibatch=minibatch,
    )


def _words(samples: int, *, length: int) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(0, WORDS, (samples, length))}


def _pairs(samples: int, *, length: int) -> dict[str, Tensor]:
    words = _words(samples, length=length)["input_ids"]
    return {"input_ids": words, "decoder_input_ids": words}


def _pictures(samples: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.rand(samples, 3, 224, 224)}


def gpt2_xl() -> Job:
    """GPT-2 XL, 1.6 billion parameters, embedding and head tied."""
    config = _transformers().GPT2Config(vocab_size=WORDS, n_embd=1600, n_layer=48, n_head=25, use_cache=False)
    return _job(lambda: _transformers().GPT2LMHeadModel(config), partial(_words, length=1024), 4)


def llama_7b() -> Job:
    """Llama 2, 7 billion parameters."""
    config = _transformers().LlamaConfig(vocab_size=WORDS, use_cache=False)
    return _job(lambda: _transformers().LlamaForCausalLM(config), partial(_words, length=2048), 1)


def qwen2_7b() -> Job:
    """Qwen2, 7 billion parameters, 4 heads of keys for 28 of queries."""
    config = _transformers().Qwen2Config(
        vocab_size=WORDS,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        use_cache=False,
    )
    return _job(lambda: _transformers().Qwen2ForCausalLM(config), partial(_words, length=2048), 1)


def bert_large() -> Job:
    """BERT large, 340 million parameters, embedding and decoder tied."""
    config = _transformers().BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    return _job(lambda: _transformers().BertForMaskedLM(config), partial(_words, length=512), 16)


def t5_large() -> Job:
    """T5 large, 740 million parameters: an encoder and a decoder with shared embeddings."""
    config = _transformers().T5Config(
        vocab_size=WORDS, d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, use_cache=False
    )
    return _job(lambda: _transformers().T5ForConditionalGeneration(config), partial(_pairs, length=512), 8)


def vit_large() -> Job:
    """ViT-L/16, 300 million parameters."""
    config = _transformers().ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000
    )
    return _job(lambda: _transformers().ViTForImageClassification(config), _pictures, 32)


def resnet_50() -> Job:
    """ResNet-50, 26 million parameters."""
    config = _transformers().ResNetConfig(num_labels=1000)
    return _job(lambda: _transformers().ResNetForImageClassification(config), _pictures, 64)
