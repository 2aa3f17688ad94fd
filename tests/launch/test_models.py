"""The bundled models: sizes as published, data in the right shapes, stages that compute what the whole computes."""

from __future__ import annotations

import copy
import itertools
import re
from pathlib import Path

import pytest
import torch
from stagewise import backward, forward, programs
from torch import nn

from pipeplan_launch import Job, load_job
from pipeplan_launch.models import BUNDLED, gnmt
from pipeplan_launch.models.generated import GeneratedImages
from pipeplan_launch.models.generated_text import BEGIN, END, FIRST_WORD, PAD, GeneratedPairs, Lengths
from pipeplan_launch.trace import TracedModel, trace

torch.set_num_threads(1)

# Of the layers of PipeDream's published profiles, added up.
PUBLISHED_BYTES = {
    "vgg16": 553_430_176,
    "alexnet": 244_403_360,
    "resnet50": 102_228_128,
    "gnmt8": 775_063_808,
    "gnmt16": 1_110_870_272,
}
OTHER_BYTES = {"mnist": 369_258 * 4, "resnet-tiny": 78_042 * 4}

TINY_GNMT = gnmt.Size(layers=3, source=5, target=4, vocabulary=13, width=4)


def on_meta(name: str) -> Job:
    """The full-size job, without memory for its parameters."""
    with torch.device("meta"):
        return load_job(name, seed=0)


@pytest.mark.parametrize("name", BUNDLED)
def test_bytes_of_parameters(name: str) -> None:
    job = on_meta(name)
    parameters = sum(one.numel() for one in job.model.parameters())
    assert parameters * 4 == {**PUBLISHED_BYTES, **OTHER_BYTES}[name]
    assert all(one.dtype == torch.float32 for one in job.model.parameters())
    listed = BUNDLED[name]
    assert (parameters, job.minibatch, job.name) == (listed["parameters"], listed["minibatch"], name)


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


@pytest.mark.parametrize("name", ["vgg16", "alexnet"])
def test_chains_are_the_published_ones_layer_by_layer(name: str, reference: Path) -> None:
    assert own_layers(on_meta(name).model) == published_layers(reference, name)


def test_resnet50_has_the_published_layers(reference: Path) -> None:
    published = published_layers(reference, "resnet50")
    assert sorted(own_layers(on_meta("resnet50").model)) == sorted(published)


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


def in_order(traced: TracedModel, stages: int) -> list[list[str]]:
    """Stages of about equally many layers, in the order of the model, so that dropout draws in the same order."""
    names = [layer.name for layer in traced.layers]
    ends = [round(len(names) * stage / stages) for stage in range(stages + 1)]
    return [names[start:end] for start, end in itertools.pairwise(ends)]


def check_stages(job: Job, minibatch: int, stages: int) -> None:
    """Loss and gradients of a split are those of the whole, in training and in evaluation."""
    torch.manual_seed(0)
    for parameter in job.model.parameters():
        nn.init.normal_(parameter, std=0.5)  # So that every parameter shows in the loss.
    traced = trace(job, minibatch)
    assert traced.dynamic_batch
    assert traced.evaluation_problem is None
    pieces = programs(traced, in_order(traced, stages))
    batch = job.example_batch(minibatch + 1)
    for train in (True, False):
        whole = copy.deepcopy(job.model).train(train)
        for piece in pieces:
            piece.train(train)
        torch.manual_seed(3)
        expected = job.loss(whole(*batch.inputs), batch.target)
        expected.backward()
        job.model.zero_grad()
        torch.manual_seed(3)
        output, received, made = forward(pieces, batch.inputs, minibatch + 1)
        loss = job.loss(output, batch.target)
        backward(loss, received, made)
        assert torch.equal(loss, expected)
        for (name, own), other in zip(job.model.named_parameters(), whole.parameters(), strict=True):
            assert own.grad.any(), name
            assert torch.equal(own.grad, other.grad), name


def test_gnmt_splits() -> None:
    check_stages(gnmt.job(TINY_GNMT, "tiny"), minibatch=3, stages=4)


def test_attention_is_the_formula() -> None:
    torch.manual_seed(0)
    attention = gnmt.Attention(3)
    for parameter in attention.parameters():
        nn.init.normal_(parameter)
    queries, states, lengths = torch.randn(2, 2, 3), torch.randn(2, 4, 3), torch.tensor([4, 2])
    out = attention(queries, states, lengths)
    for sample in range(2):
        words = states[sample, : lengths[sample]]
        for place in range(2):
            asked = attention.query @ queries[sample, place]
            scores = torch.stack([attention.v @ torch.tanh(asked + attention.key @ word) for word in words])
            weights = scores.exp() / scores.exp().sum()
            expected = sum(weight * word for weight, word in zip(weights, words, strict=True))
            torch.testing.assert_close(out[sample, place], expected)


def test_gnmt_loss_leaves_padding_out() -> None:
    job = gnmt.job(TINY_GNMT, "tiny")
    scores = torch.randn(2, 4, 13)
    target = torch.tensor([[5, 3, PAD, PAD], [7, 8, 9, 3]])
    words = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    losses = [-scores[a, b].log_softmax(0)[target[a, b]] for a, b in words]
    torch.testing.assert_close(job.loss(scores, target), sum(losses) / 8)
    best = torch.nn.functional.one_hot(target, 13).float()
    assert job.correct(best, target) == 2
    best[1, 2] = best[1, 0]
    assert job.correct(best, target) == 1
    torch.testing.assert_close(job.metrics["words right"](best, target), torch.tensor(5 / 6))


def test_generated_pairs() -> None:
    sizes = Lengths(source=8, target=7, vocabulary=12)
    pairs = GeneratedPairs(40, sizes, seed=1)
    lengths = set()
    for (source, length, said), expected in (pairs[index] for index in range(40)):
        assert (source.shape, said.shape, expected.shape) == ((8,), (7,), (7,))
        lengths.add(int(length))
        assert (source[:length] >= FIRST_WORD).all()
        assert (source[length:] == PAD).all()
        assert max(source.max(), said.max(), expected.max()) < 12
        end = int((expected == END).nonzero()[0])
        assert said[0] == BEGIN
        assert torch.equal(said[1 : end + 1], expected[:end])
        assert (expected[end + 1 :] == PAD).all()
        moved = [int(word) + 1 if word < 11 else FIRST_WORD for word in source[:end]]
        assert expected[:end].tolist() == moved
    assert lengths == {4, 5, 6, 7, 8}
    with pytest.raises(IndexError):
        pairs[40]


def test_digits() -> None:
    data = load_job("mnist", seed=0).datasets
    train, test = data.train.tensors, data.test.tensors
    assert [tuple(one.shape) for one in (*train, *test)] == [(1437, 1, 28, 28), (1437,), (360, 1, 28, 28), (360,)]
    assert train[0].min() == 0
    assert train[0].max() == 1
    assert torch.bincount(test[1]).min() > 20
    again = load_job("mnist", seed=5).datasets
    assert torch.equal(again.train.tensors[0], train[0])


def test_small_models_learn_shapes() -> None:
    for name in ("mnist", "resnet-tiny"):
        job = load_job(name, seed=0)
        batch = job.example_batch(4)
        assert job.model(*batch.inputs).shape == (4, 10)


@pytest.mark.parametrize("name", BUNDLED)
def test_example_inputs_have_the_shapes_of_the_data(name: str) -> None:
    with torch.device("meta"):
        job = load_job(name, seed=0)
    examples, samples = job.example_inputs(2), job.example_batch(2).inputs
    assert [(one.shape, one.dtype) for one in examples] == [(one.shape, one.dtype) for one in samples]


def test_generated_images_are_the_same_every_time() -> None:
    one, two = (GeneratedImages(5, (1, 2, 2), classes=3, seed=1) for _ in range(2))
    assert torch.equal(one[4][0], two[4][0])
    assert one[4][1] == 1
    assert not torch.equal(one[3][0], one[4][0])
    assert len(one) == 5
    with pytest.raises(IndexError):
        one[5]
