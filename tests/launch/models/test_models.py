"""The bundled models: sizes as published, layer by layer where they are; in tiny sizes, what models of language compute
and how they split; and their data."""

from __future__ import annotations

import copy
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from extents import slow_but_for
from stagewise import backward, consecutive_pipeline, forward, programs
from torch import nn

from pipeplan_launch import Job, load_job
from pipeplan_launch.job.bundled_models import BUNDLED
from pipeplan_launch.models import awd_lm, gnmt, s2vt
from pipeplan_launch.models.synthetic_data import (
    BEGIN,
    END,
    FIRST_WORD,
    PAD,
    generated_images,
    generated_text,
    right_words,
    sentence_pair,
    text_loss,
)
from pipeplan_launch.tracing.trace import trace_job

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


TINY_GNMT = gnmt.GNMTSize(layers=3, source=5, target=4, vocabulary=13, width=4)
TINY_AWD = awd_lm.AWDLMSize(embedding=5, hidden=6, layers=2, tied=False, vocabulary=13, length=4)
TINY_S2VT = s2vt.S2VTSize(steps=8, features=32, embedding=5, hidden=4, vocabulary=13)


@pytest.mark.parametrize("name", slow_but_for(["s2vt"], ["gnmt", "awd-lm", "s2vt"]))
def test_split_equals_whole(name: str) -> None:
    job = {
        "gnmt": lambda: gnmt.gnmt_job(TINY_GNMT, "tiny"),
        "awd-lm": lambda: awd_lm.awd_lm_job(TINY_AWD, "tiny", minibatch=3),
        "s2vt": lambda: s2vt.s2vt_job(TINY_S2VT, "tiny"),
    }[name]()
    torch.manual_seed(0)
    for parameter in job.model.parameters():
        nn.init.normal_(parameter, std=0.5)  # So that every parameter shows in the loss.
    traced = trace_job(job, 3)
    assert traced.dynamic_batch
    assert traced.evaluation_problem is None
    pieces = programs(traced, consecutive_pipeline(traced, stages=4, seed=0))
    # In the order of the model, dropout draws the same numbers. The targets are those of the data.
    batch = job.example_batch(4)
    for train in (True, False):
        whole = copy.deepcopy(job.model).train(train)
        torch.manual_seed(3)
        expected = job.loss(whole(*batch.inputs), batch.target)
        expected.backward()
        job.model.zero_grad()
        torch.manual_seed(3)
        output, received, made = forward([piece.train(train) for piece in pieces], batch.inputs, 4)
        loss = job.loss(output, batch.target)
        backward(loss, received, made)
        assert torch.equal(loss, expected)
        for (name, own), other in zip(job.model.named_parameters(), whole.parameters(), strict=True):
            assert own.grad.any(), name
            assert torch.equal(own.grad, other.grad), name


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


def test_words_that_are_padding_do_not_count() -> None:
    scores = torch.randn(2, 4, 13)
    target = torch.tensor([[5, END, PAD, PAD], [7, 8, 9, END]])
    words = [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3)]
    losses = [-scores[a, b].log_softmax(0)[target[a, b]] for a, b in words]
    torch.testing.assert_close(text_loss(scores, target), sum(losses) / 8)
    best = nn.functional.one_hot(target, 13).float()
    assert right_words(best, target) == 2
    best[1, 2] = best[1, 0]
    assert right_words(best, target) == 1.75
    best[0, 3] = best[1, 0]
    assert right_words(best, target) == 1.75


def lstm_by_hand(x: torch.Tensor, parameters: list[torch.Tensor]) -> torch.Tensor:
    """Samples × length × hidden, cell by cell (Hochreiter and Schmidhuber, with forget gates)."""
    weight_ih, weight_hh, bias_ih, bias_hh = parameters
    hidden = cell = torch.zeros(len(x), weight_hh.shape[1])
    out = []
    for step in x.unbind(dim=1):
        gates = step @ weight_ih.T + bias_ih + hidden @ weight_hh.T + bias_hh
        enter, forget, new, leave = gates.chunk(4, dim=1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        hidden = leave.sigmoid() * cell.tanh()
        out.append(hidden)
    return torch.stack(out, dim=1)


def test_weights_drop_out_of_an_lstm_as_it_trains() -> None:
    torch.manual_seed(0)
    lstm = awd_lm.WeightDropLSTM(3, 5)
    x = torch.randn(2, 4, 3)
    torch.manual_seed(1)
    out = lstm(x)
    out.square().sum().backward()
    torch.manual_seed(1)
    kept = nn.functional.dropout(torch.ones(20, 5), 0.5)
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    weight_ih, weight_hh, *biases = [one.detach() for one in lstm.parameters()]
    torch.testing.assert_close(out.detach(), lstm_by_hand(x, [weight_ih, weight_hh * kept, *biases]))
    assert torch.equal(lstm.weight_hh_l0.grad != 0, kept != 0)
    lstm.eval()
    torch.testing.assert_close(lstm(x).detach(), lstm_by_hand(x, [weight_ih, weight_hh, *biases]))


def test_awd_lm_drops_the_same_at_every_place() -> None:
    torch.manual_seed(0)
    dropped = awd_lm.LockedDropout(0.5)(torch.ones(3, 7, 20))
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(dropped, dropped[:, :1].expand(3, 7, 20))
    assert not torch.equal(dropped[0], dropped[1])

    embedding = awd_lm.WordDropEmbedding(60, 3)
    text = torch.arange(60).repeat(2, 1)
    vectors = embedding(text)
    gone = (vectors == 0).all(dim=2)
    assert 0 < gone[0].sum() < 20
    assert torch.equal(gone[0], gone[1])
    torch.testing.assert_close(vectors[~gone], embedding.weight[text[~gone]] / 0.9)
    assert torch.equal(embedding.eval()(text), embedding.weight[text])


def test_generated_pairs() -> None:
    data = generated_text(partial(sentence_pair, 8, 7, 12), samples=40)
    for (source, length, said), expected in (data.train[index] for index in range(40)):
        assert (source.shape, said.shape, expected.shape) == ((8,), (7,), (7,))
        assert FIRST_WORD <= source[:length].min() <= source.max() < 12
        assert not (source[length:] != PAD).any()
        end = int((expected == END).nonzero()[0])
        assert end == min(length, 6)
        assert said[: end + 1].tolist() == [BEGIN, *expected[:end].tolist()]
        assert (expected[end + 1 :] == PAD).all()
        assert expected[:end].tolist() == [int(word) + 1 if word < 11 else FIRST_WORD for word in source[:end]]
    assert len(data.test) == 10
    assert torch.equal(data.train[7][1], data.train[7][1])
    with pytest.raises(IndexError):
        data.train[40]


def test_generated_text_goes_on_by_one_word() -> None:
    train = awd_lm.awd_lm_job(TINY_AWD, "tiny", 3).datasets.train
    for text, following in (train[index] for index in range(100)):
        assert text.shape == following.shape == (4,)
        assert torch.equal(text[1:], following[:-1])
        assert FIRST_WORD <= following.min() <= following.max() < 13


def test_generated_videos_say_words_after_their_frames() -> None:
    train = s2vt.s2vt_job(TINY_S2VT, "tiny").datasets.train
    counts = set()
    for (frames, said), target in (train[index] for index in range(60)):
        assert (frames.shape, said.shape, target.shape) == ((8, 32), (8,), (8,))
        count = int((frames != 0).any(dim=1).sum())
        assert (frames[:count] != 0).any(dim=1).all()
        assert said[:count].tolist() == target[:count].tolist() == [PAD] * count
        assert (said[count], target[count + 1]) == (BEGIN, END)
        assert said[count + 1] == target[count] >= FIRST_WORD
        assert not said[count + 2 :].any()
        counts.add(count)
    assert counts == {2, 3, 4, 5, 6}
