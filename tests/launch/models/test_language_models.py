"""The bundled models of language, in tiny sizes: what they compute, how they split, and their data."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from extents import slow_but_for
from stagewise import backward, consecutive_pipeline, forward, programs
from torch import nn

from pipeplan_launch.models import awd_lm, gnmt, s2vt
from pipeplan_launch.models.synthetic_data import (
    BEGIN,
    END,
    FIRST_WORD,
    PAD,
    generated_text,
    right_words,
    sentence_pair,
    text_loss,
)
from pipeplan_launch.tracing.trace import trace_job

torch.set_num_threads(1)

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
