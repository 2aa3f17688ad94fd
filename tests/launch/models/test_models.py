"""The bundled models: sizes as published, layer by layer where they are, and data in the right shapes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from pipeplan_launch import Job, load_job
from pipeplan_launch.job.bundled_models import BUNDLED
from pipeplan_launch.models.synthetic_data import generated_images

torch.set_num_threads(1)

# Of the layers of PipeDream's published profiles, added up.
PUBLISHED_BYTES = {
    "vgg16": 553_430_176,
    "alexnet": 244_403_360,
    "resnet50": 102_228_128,
    "gnmt8": 775_063_808,
    "gnmt16": 1_110_870_272,
}
# What the papers' shapes come to; docs/models.md says where each is from.
OTHER_BYTES = {"mnist": 369_258 * 4, "resnet-tiny": 78_042 * 4, "awd-lm": 408_232_000, "s2vt": 349_450_672}


def on_meta(name: str) -> Job:
    """The full-size job, without memory for its parameters."""
    with torch.device("meta"):
        return load_job(name, seed=0)


@pytest.mark.parametrize("name", BUNDLED)
def test_bytes_of_parameters_and_shapes_of_inputs(name: str) -> None:
    job = on_meta(name)
    parameters = sum(one.numel() for one in job.model.parameters())
    assert parameters * 4 == {**PUBLISHED_BYTES, **OTHER_BYTES}[name]
    assert all(one.dtype == torch.float32 for one in job.model.parameters())
    listed = BUNDLED[name]
    assert (parameters, job.minibatch, job.name) == (listed["parameters"], listed["minibatch"], name)
    examples, samples = job.example_inputs(2), job.example_batch(2).inputs
    assert [(one.shape, one.dtype) for one in examples] == [(one.shape, one.dtype) for one in samples]


def test_awd_lm_in_the_papers_size() -> None:
    job = on_meta("pipeplan_launch.models.awd_lm:paper")
    assert (sum(one.numel() for one in job.model.parameters()), job.minibatch) == (24_221_600, 40)


def published_layers(folder: Path, name: str) -> list[tuple[str, int]]:
    """(what it is, bytes of parameters) of the layers that have any, in the order of their numbers."""
    text = (folder / "pipedream" / f"{name}.txt").read_text()
    found = re.findall(r"^node(\d+) -- (\w+).* parameter_size=([\d.]+)", text, re.MULTILINE)
    layers = sorted((int(number), kind, int(float(size))) for number, kind, size in found)
    return [(kind, size) for _, kind, size in layers if size]


def own_layers(model: nn.Module) -> list[tuple[str, int]]:
    """The same of a model, in the order of its modules."""
    layers = []
    for module in model.modules():
        size = sum(one.numel() * 4 for one in module.parameters(recurse=False))
        if size:
            layers.append((type(module).__name__, size))
    return layers


def test_convolutional_models_are_the_published_ones_layer_by_layer(reference: Path) -> None:
    for name in ("vgg16", "alexnet"):
        assert own_layers(on_meta(name).model) == published_layers(reference, name)
    assert sorted(own_layers(on_meta("resnet50").model)) == sorted(published_layers(reference, "resnet50"))


@pytest.mark.parametrize("name", ["gnmt8", "gnmt16"])
def test_gnmt_is_the_published_one_layer_by_layer(name: str, reference: Path) -> None:
    published = published_layers(reference, name)
    layers = own_layers(on_meta(name).model)
    # What the profile has as one node is two layers here: the decoder's first LSTM and the attention.
    index = next(index for index, (kind, _) in enumerate(layers) if kind == "Attention")
    (lstm, first), (_, attention) = layers[index - 1 : index + 1]
    assert lstm == "LSTM"
    layers[index - 1 : index + 1] = [("RecurrentAttention", first + attention)]
    names = {"EmuBidirLSTM": "LSTM", "Classifier": "Linear"}
    assert layers == [(names.get(kind, kind), size) for kind, size in published]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "minibatch", "places"), [("gnmt8", 32, 48), ("gnmt16", 128, 25)])
def test_gnmt_makes_outputs_of_the_published_sizes(name: str, minibatch: int, places: int, reference: Path) -> None:
    text = (reference / "pipedream" / f"{name}.txt").read_text()
    kinds = "Embedding|EmuBidirLSTM|LSTM|RecurrentAttention|Classifier"
    published = re.findall(rf"^node\d+ -- (?:{kinds})\(.* activation_size=\[?([\d.]+)", text, re.MULTILINE)
    job, made = on_meta(name), []
    for module in job.model.modules():
        if isinstance(module, nn.Embedding | nn.LSTM | nn.Linear):
            module.register_forward_hook(lambda _, __, out: made.append(out[0] if isinstance(out, tuple) else out))
    with torch.device("meta"):
        job.model(*job.example_inputs(minibatch))
    sizes = [one.numel() * 4 for one in made]
    # The profile's decoder looks up the last word too, though no LSTM reads it.
    decoders_embedding = len(job.model.encoder.lstms) + 2
    sizes[decoders_embedding] = minibatch * places * 1024 * 4
    assert sizes == [int(float(size)) for size in published]


def test_digits() -> None:
    data = load_job("mnist", seed=0).datasets
    train, test = data.train.tensors, data.test.tensors
    assert [tuple(one.shape) for one in (*train, *test)] == [(1437, 1, 28, 28), (1437,), (360, 1, 28, 28), (360,)]
    assert train[0].min() == 0
    assert train[0].max() == 1
    assert torch.bincount(test[1]).min() > 20
    again = load_job("mnist", seed=5).datasets
    assert torch.equal(again.train.tensors[0], train[0])


def test_generated_images_are_the_same_every_time() -> None:
    one, two = (generated_images((1, 2, 2), classes=3, samples=5).train for _ in range(2))
    assert torch.equal(one[4][0], two[4][0])
    assert one[4][1] == 1
    assert not torch.equal(one[3][0], one[4][0])
    assert len(one) == 5
    with pytest.raises(IndexError):
        one[5]
