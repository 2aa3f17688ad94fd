"""The page on LoRA: stages train adapters as the whole model does, and peft loads what is exported."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from saved import save
from shown import GALLERY
from stagewise import backward, forward, programs

from pipeplan_launch import export
from pipeplan_launch.job.loading import load_job
from pipeplan_launch.runtime import stage_checkpoint
from pipeplan_launch.tracing.trace import trace_job

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
REF = f"{GALLERY / 'lora.py'}:job"
BATCH = 2


@pytest.mark.gallery
def test_adapters_train_in_two_stages_and_peft_loads_them(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    job = load_job(REF, 0)
    whole, batch = copy.deepcopy(job.model).train(), job.example_batch(BATCH)
    traced = trace_job(job, BATCH, "module")
    names = [layer.name for layer in traced.layers]
    stages = programs(traced, [names[:5], names[5:]])
    for _ in range(2):
        optimizers = [
            job.make_optimizer([one for one in model.parameters() if one.requires_grad]) for model in (whole, job.model)
        ]
        expected = job.loss(whole(**dict(zip(traced.input_names, batch.inputs, strict=True))), batch.target)
        expected.backward()
        output, received, made = forward([stage.train() for stage in stages], list(batch.inputs), BATCH)
        loss = job.loss(output, batch.target)
        backward(loss, received, made)
        assert torch.equal(loss, expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = {name: one for stage in stages for name, one in stage_checkpoint.model_state(stage).items()}
    save(tmp_path / "run", state, state_dict=stages[0].naming.state_dict, model_ref=REF)
    export.export_adapter(tmp_path / "run", tmp_path / "adapter")
    found = peft.PeftModel.from_pretrained(load_job(REF, 0).model.get_base_model(), str(tmp_path / "adapter"))
    written = peft.get_peft_model_state_dict(found)
    trained = peft.get_peft_model_state_dict(whole)
    assert written.keys() == trained.keys()
    assert all(torch.equal(written[name], trained[name]) for name in trained)
