"""Ten small jobs of Hugging Face families, with what real jobs have, for the first prediction that a user sees.

Every function without `_` makes a job. Nothing in pipeplan is fitted to them. AdamW, warm-up for each minibatch,
clipping by the global norm, dropout as the family has it; some run under autocast.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import Dataset, default_collate

from pipeplan_launch import Data, Job

WORDS, LENGTH, SIDE, CLASSES, SAMPLES = 2000, 64, 64, 100, 1024
WARM_UP = 100
SMALL = {"vocab_size": WORDS, "hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 6}
"""What most text models have in common."""


class _Samples(Dataset[Any]):
    """Random samples: what the model is called with, and the classes."""

    def __init__(self, make: Callable[[torch.Generator], dict[str, Tensor]], target: tuple[int, ...]) -> None:
        self._make, self._target = make, target

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(index)
        highest = WORDS if self._target else CLASSES
        return self._make(generator), torch.randint(highest, self._target, generator=generator)


def _text(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": torch.randint(3, WORDS, (LENGTH,), generator=generator)}


def _pair(generator: torch.Generator) -> dict[str, Tensor]:
    return _text(generator) | {"decoder_input_ids": torch.randint(3, WORDS, (LENGTH,), generator=generator)}


def _image(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(3, SIDE, SIDE, generator=generator)}


def _cross_entropy(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, -2).float(), target.flatten())


def _warm_up(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARM_UP))


def _job(
    model: nn.Module,
    make: Callable[[torch.Generator], dict[str, Tensor]],
    target: tuple[int, ...] = (LENGTH,),
    minibatch: int = 8,
    autocast: torch.dtype | None = None,
) -> Job:
    return Job(
        model,
        loss=_cross_entropy,
        data=lambda: Data(_Samples(make, target), collate=default_collate),
        optimizer=partial(AdamW, lr=3e-4, weight_decay=0.01),
        scheduler=_warm_up,
        scheduler_interval="minibatch",
        clip_norm=1.0,
        autocast=autocast,
        minibatch=minibatch,
    )


def opt() -> Job:
    """A decoder with tied weights."""
    config = transformers.OPTConfig(
        **SMALL,
        ffn_dim=768,
        max_position_embeddings=LENGTH,
        word_embed_proj_dim=192,
        use_cache=False,
    )
    return _job(transformers.OPTForCausalLM(config), _text)


def gpt_neox() -> Job:
    """A decoder with parallel blocks and rotary positions, under autocast."""
    config = transformers.GPTNeoXConfig(
        **SMALL,
        intermediate_size=768,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        use_cache=False,
    )
    return _job(transformers.GPTNeoXForCausalLM(config), _text, autocast=torch.bfloat16)


def electra() -> Job:
    """An encoder with a small embedding."""
    config = transformers.ElectraConfig(
        **SMALL,
        embedding_size=96,
        intermediate_size=768,
    )
    return _job(transformers.ElectraForMaskedLM(config), _text)


def roberta() -> Job:
    """An encoder that predicts words, whose output layer is tied to its embedding."""
    config = transformers.RobertaConfig(
        **SMALL,
        intermediate_size=768,
        max_position_embeddings=LENGTH + 2,
    )
    return _job(transformers.RobertaForMaskedLM(config), _text)


def bart() -> Job:
    """An encoder and a decoder."""
    config = transformers.BartConfig(
        vocab_size=WORDS,
        d_model=128,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return _job(transformers.BartForConditionalGeneration(config), _pair)


def qwen2() -> Job:
    """A decoder with grouped queries and gated layers."""
    config = transformers.Qwen2Config(
        **SMALL,
        intermediate_size=512,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    return _job(transformers.Qwen2ForCausalLM(config), _text)


def deit() -> Job:
    """A vision transformer."""
    config = transformers.DeiTConfig(
        hidden_size=192,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=6,
        image_size=SIDE,
        patch_size=8,
        hidden_dropout_prob=0.1,
        num_labels=CLASSES,
    )
    return _job(transformers.DeiTForImageClassification(config), _image, ())


def convnext() -> Job:
    """Convolutions of the kind of ConvNeXt."""
    config = transformers.ConvNextConfig(
        depths=[2, 2, 4, 2], hidden_sizes=[32, 64, 128, 256], image_size=SIDE, drop_path_rate=0.1, num_labels=CLASSES
    )
    return _job(transformers.ConvNextForImageClassification(config), _image, ())


def regnet() -> Job:
    """Grouped convolutions with batch normalisation."""
    config = transformers.RegNetConfig(
        embedding_size=16, hidden_sizes=[32, 64, 128, 256], depths=[1, 2, 3, 1], groups_width=16, num_labels=CLASSES
    )
    return _job(transformers.RegNetForImageClassification(config), _image, (), minibatch=16)


def swin() -> Job:
    """Attention within windows, under autocast."""
    config = transformers.SwinConfig(
        image_size=SIDE,
        patch_size=4,
        embed_dim=48,
        depths=[2, 2, 4],
        num_heads=[3, 6, 12],
        window_size=4,
        num_labels=CLASSES,
    )
    return _job(transformers.SwinForImageClassification(config), _image, (), autocast=torch.bfloat16)
