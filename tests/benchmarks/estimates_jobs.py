"""Models for `estimates.py`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from pipeplan_launch.job.job import Job
from pipeplan_launch.models import resnet50
from pipeplan_launch.models.gnmt import GNMT8, GNMT16, gnmt_job


def gnmt8() -> Job:
    """GNMT-8 on sentences of 31 words."""
    return gnmt_job(replace(GNMT8, source=31, target=31), "gnmt8")


def gnmt16() -> Job:
    """GNMT-16 on sentences of 34 words."""
    return gnmt_job(replace(GNMT16, source=34, target=34), "gnmt16")


def resnet50_mixed() -> Job:
    """ResNet-50 under autocast, channels last."""
    plain = resnet50.build()
    return Job(
        plain.model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        inputs=lambda n: torch.empty(n, 3, 224, 224).to(memory_format=torch.channels_last),
        autocast=torch.bfloat16,
        name="resnet50",
    )


def llama7b() -> Job:
    """Llama 2 of 7 B parameters in bfloat16, on 2048 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(use_cache=False)).to(torch.bfloat16)
    return Job(_Scores(model), inputs=lambda n: torch.zeros(n, 2048, dtype=torch.long), name="llama-7b", minibatch=1)


class _Scores(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores for every next token."""
        scores: Tensor = self.model(tokens).logits
        return scores
