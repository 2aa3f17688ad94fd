"""LoRA: a small Llama of Hugging Face with frozen weights, and adapters by peft that alone are trained.

`pip install transformers peft`, then `pipeplan profile lora.py:job`. Nothing is downloaded: the weights are random.
"""

import peft
import torch
import transformers
from torch.utils.data import Dataset

from pipeplan_launch import Data, Job

WORDS, LENGTH = 64, 32


class Counting(Dataset):
    """Sentences that count up by one, and the labels that the model computes its loss from."""

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = (torch.arange(LENGTH) + self.first + index) % WORDS
        return {"input_ids": ids, "labels": ids}


def base() -> transformers.LlamaForCausalLM:
    """The model that is adapted: 26 million weights."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=512,
            intermediate_size=1408,
            num_hidden_layers=8,
            num_attention_heads=8,
            eos_token_id=None,
        )
    )


def job() -> Job:
    config = peft.LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    return Job(
        peft.get_peft_model(base(), config),
        loss=lambda output, batch: output.loss,
        data=lambda: Data(Counting(0, 128)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        name="llama-lora",
        minibatch=4,
    )
