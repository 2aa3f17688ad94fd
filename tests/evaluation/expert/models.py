"""The models of `expert_table.py`, with the data, optimiser and precision that their users take.

Each function returns a job under autocast in bfloat16, with parameters and optimiser state in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from pipeplan_launch import Data, Job

SAMPLES = 1024


def gpt2_xl() -> Job:
    """GPT-2 XL: 1.6 billion parameters, 48 blocks, 1,024 tokens; embedding and head are tied."""
    config = _hf().GPT2Config(n_embd=1600, n_layer=48, n_head=25, use_cache=False)
    return _words(_hf().GPT2LMHeadModel(config), 1024, 8, "gpt2-xl")


def llama3_8b() -> Job:
    """Llama-3 8B: 8.0 billion parameters, 32 blocks, 4,096 tokens."""
    config = _hf().LlamaConfig(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        use_cache=False,
    )
    return _words(_hf().LlamaForCausalLM(config), 4096, 2, "llama3-8b")


def qwen25_7b() -> Job:
    """Qwen2.5 7B: 7.6 billion parameters, 28 blocks, 4,096 tokens."""
    config = _hf().Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        use_cache=False,
    )
    return _words(_hf().Qwen2ForCausalLM(config), 4096, 2, "qwen2.5-7b")


def bert_large() -> Job:
    """BERT-large: 340 million parameters, 24 blocks, 512 tokens; embedding and decoder are tied."""
    config = _hf().BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096)
    return _words(_hf().BertForMaskedLM(config), 512, 32, "bert-large")


def t5_large() -> Job:
    """T5-large: 740 million parameters, 24 + 24 blocks, 512 and 128 tokens; embeddings and head are tied."""
    config = _hf().T5Config(
        vocab_size=32128, d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16, use_cache=False
    )
    config.decoder_start_token_id = 0

    def sample(index: int) -> dict[str, Tensor]:
        return {"input_ids": _ids(index, 512, 32128), "labels": _ids(index, 128, 32128)}

    return _job(_hf().T5ForConditionalGeneration(config), sample, 16, "t5-large", 512)


def vit_large() -> Job:
    """ViT-L/16: 304 million parameters, 24 blocks, images of 224 x 224."""
    config = _hf().ViTConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096, num_labels=1000
    )
    return _job(_hf().ViTForImageClassification(config), _image, 64, "vit-l")


def resnet152() -> Job:
    """ResNet-152: 60 million parameters, images of 224 x 224, channels last, SGD with momentum."""
    config = _hf().ResNetConfig(depths=[3, 8, 36, 3], layer_type="bottleneck", num_labels=1000)
    model = _hf().ResNetForImageClassification(config).to(memory_format=torch.channels_last)

    def momentum(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-4)

    return _job(model, _image, 128, "resnet-152", optimizer=momentum)


def unet() -> Job:
    """A U-Net as Stable Diffusion has it: 0.86 billion parameters, latents of 4 x 64 x 64, 77 tokens of text."""
    from unet import UNet

    def sample(index: int) -> tuple[dict[str, Tensor], Tensor]:
        noise = torch.randn(4, 64, 64, generator=torch.Generator().manual_seed(index))
        return {"latents": noise, "time": torch.tensor(index % 1000), "text": torch.zeros(77, 768)}, noise

    return Job(
        UNet(),
        data=lambda: Data(_Samples(sample)),
        loss=lambda output, noise: nn.functional.mse_loss(output.float(), noise),
        optimizer=_adamw,
        autocast=torch.bfloat16,
        minibatch=32,
        name="unet",
    )


class _Samples(Dataset[Any]):
    """Generated samples, the same in every process."""

    def __init__(self, sample: Callable[[int], Any]) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return self.sample(index)


def _hf() -> Any:
    """The library, whose import takes seconds."""
    import transformers

    return transformers


def _ids(index: int, length: int, vocabulary: int) -> Tensor:
    return (torch.arange(length) + index) % vocabulary


def _image(index: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.full((3, 224, 224), index / SAMPLES), "labels": torch.tensor(index % 1000)}


def _words(model: Any, length: int, minibatch: int, name: str) -> Job:
    """A job for a model that reads words and computes its own loss."""

    def sample(index: int) -> dict[str, Tensor]:
        ids = _ids(index, length, model.config.vocab_size)
        return {"input_ids": ids, "labels": ids}

    return _job(model, sample, minibatch, name, length)


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _job(
    model: nn.Module,
    sample: Callable[[int], Mapping[str, Tensor]],
    minibatch: int,
    name: str,
    tokens: int = 0,
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = _adamw,
) -> Job:
    return Job(
        model,
        data=lambda: Data(_Samples(sample)),
        loss=lambda output, batch: output.loss,
        optimizer=optimizer,
        autocast=torch.bfloat16,
        minibatch=minibatch,
        name=name,
        tokens_per_sample=tokens,
    )
