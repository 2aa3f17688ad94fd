"""Memory that messages arrive in: what is written is read, and it is used again once nothing refers to it."""

from __future__ import annotations

import pytest
import torch

from pipeplan_launch.comm.ring_buffer import ALIGNMENT, MessageTensor, SlotPool, tensor_offsets, write_message

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def wires_of(tensors: list[torch.Tensor]) -> list[MessageTensor]:
    return [MessageTensor(tuple(tensor.shape), tensor.dtype) for tensor in tensors]


def test_what_is_written_is_read() -> None:
    tensors = [(torch.randn(3, 5) * 4).to(dtype) for dtype in DTYPES]
    tensors += [torch.tensor(7.5), torch.empty(0, 4), torch.randn(70_000)]
    slots, wires = SlotPool(), wires_of(tensors)
    slot = slots.take(tensor_offsets([wire.size for wire in wires])[-1])
    write_message(slot.file, tensors)
    read = slots.tensors(slot, wires)
    for sent, received in zip(tensors, read, strict=True):
        assert received.dtype == sent.dtype
        assert torch.equal(received, sent)
        assert received.data_ptr() % ALIGNMENT == 0


def test_tensors_of_a_message_do_not_overlap_and_are_leaves() -> None:
    slots, wires = SlotPool(), [MessageTensor((3,), torch.float32), MessageTensor((5,), torch.float32)]
    one, other = slots.tensors(slots.take(tensor_offsets([12, 20])[-1]), wires)
    one.fill_(1.0)
    other.fill_(2.0)
    assert one.tolist() == [1.0] * 3
    one.requires_grad_()
    product = (one * one).sum()
    other.add_(1.0)  # counts for itself: autograd must not take it for a change of the first
    product.backward()
    assert one.grad is not None


def test_a_slot_is_used_again_when_nothing_refers_to_it() -> None:
    slots, wires = SlotPool(), [MessageTensor((1000,), torch.float64), MessageTensor((2,), torch.float64)]
    slot = slots.take(8016)
    tensors = slots.tensors(slot, wires)
    kept = tensors[1].view(1, 2)[:, 1]
    assert slots.take(8016) is not slot
    del tensors
    assert slots.take(8016) is not slot, "a view of one of its tensors is still there"
    del kept
    assert slots.take(8016) is slot


def test_backward_keeps_what_it_needs() -> None:
    slots, wire = SlotPool(), MessageTensor((512,), torch.float64)
    slot = slots.take(wire.size)
    (received,) = slots.tensors(slot, [wire])
    received.fill_(3.0).requires_grad_()
    weight = torch.ones(512, dtype=torch.float64, requires_grad=True)
    loss = (received * weight).sum()
    del received
    assert slots.take(wire.size) is not slot
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0] * 512
    del loss
    assert slots.take(wire.size) is slot


@pytest.mark.parametrize(("size", "fits"), [(100_000, True), (60_000, True), (20_000, False), (200_000, False)])
def test_a_slot_is_not_used_for_what_is_too_large_or_much_too_small(size: int, fits: bool) -> None:
    slots, wire = SlotPool(), MessageTensor((100_000,), torch.uint8)
    slot = slots.take(wire.size)
    slots.tensors(slot, [wire])
    assert (slots.take(size) is slot) is fits
