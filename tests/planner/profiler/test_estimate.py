"""Estimates: FLOPs and bytes against closed forms, sizes against the measuring profiler, times against the roofline."""

from __future__ import annotations

import importlib.util
import logging
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from repository import ROOT
from torch import nn

from pipeplan.cluster_data import devices
from pipeplan.errors import InputError
from pipeplan.profile_data.layers import SampleFlops, SampleWork
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler.estimate.estimator import TracedJob, trace_for_estimate
from pipeplan.profiler.estimate.flops import WorkCounts, count_work, counted_work
from pipeplan.profiler.estimate.work import TransformedWork, Work, operator_seconds
from pipeplan.profiler.options import ProfilerOptions
from pipeplan.profiler.passes import sum_of_outputs
from pipeplan.profiler.profiler import profile_model
from pipeplan_launch.job.job import Data, Job
from pipeplan_launch.tracing.trace import trace_job

JOBS = ROOT / "tests" / "support" / "estimate_jobs.py"
V100 = devices.load_device("v100")


def ref(name: str) -> str:
    return f"{JOBS}:{name}"


def estimated(name: str, device: str = "v100", **options: Any) -> Profile:
    return profile_model(ref(name), ProfilerOptions(device=device, **options))


@cache
def counted(name: str) -> tuple[TracedJob, WorkCounts]:
    built = trace_for_estimate(ref(name), 0, None, "layer")
    return built, count_work(built.traced, built.job.example_batch(built.job.minibatch), sum_of_outputs)


def flops(name: str, layer: str) -> tuple[float, float]:
    """Forward and backward."""
    _, counts = counted(name)
    forward, backward = counts.forward[layer], counts.backward[layer]
    return sum(work.flops for work in forward), sum(work.flops for work in backward)


def test_a_linear_layer_multiplies_once_forwards_and_twice_backwards_but_the_first() -> None:
    first, second = 2 * 64 * 100 * 200, 2 * 64 * 200 * 50
    assert (flops("mlp", "0"), flops("mlp", "2")) == ((first, first), (second, 2 * second))
    _, counts = counted("mlp")
    (work,), (relu,), (back,) = counts.forward["2"], counts.forward["1"], counts.backward["1"]
    assert work.bytes == 4 * (64 * 200 + 200 * 50 + 50 + 64 * 50)
    assert (relu.kind, relu.bytes) == ("elementwise", 4 * 2 * 64 * 200)
    assert back.bytes == 4 * 3 * 64 * 200
    built, counts = counted("mlp_in_bfloat16")
    assert counts.tensor_bytes["0"] == 2 * 64 * 200, "autocast halves what is computed and sent"
    assert {work.arithmetic for work in counts.forward["2"] if work.kind == "matmul"} == {"bfloat16"}
    assert built.traced.autocast is torch.bfloat16


def multiplications(conv: nn.Conv2d | nn.ConvTranspose2d, size: int) -> tuple[int, int]:
    """Of a convolution of 4 samples, by counting; and the side of what it makes."""
    kernel, stride, padded = conv.kernel_size[0], conv.stride[0], int(conv.padding[0])
    a_place = conv.in_channels // conv.groups * conv.out_channels * kernel * kernel
    if isinstance(conv, nn.ConvTranspose2d):
        return 4 * size * size * a_place, (size - 1) * stride + kernel
    made = sum(
        1 for left in range(-padded, size + padded) if left + kernel <= size + padded and not (left + padded) % stride
    )
    return 4 * made * made * a_place, made


def test_convolutions_of_every_kind_multiply_as_often_as_by_counting() -> None:
    built, _ = counted("convolutions")
    size = 20
    for index, conv in enumerate(built.job.model.children()):
        expected, size = multiplications(conv, size)
        forward, backward = flops("convolutions", str(index))
        assert forward == 2 * expected
        # The first needs no gradient by its input.
        assert backward == 2 * expected * (2 if index else 1)


def test_recurrent_layers_multiply_by_all_weights_at_every_step() -> None:
    forward, backward = flops("recurrent", "first")
    weights = [4 * 32 * (24 + 32), 4 * 32 * (64 + 32)]
    assert forward == 2 * 8 * 10 * 2 * sum(weights)
    # Backwards twice that, but for the gradients by the input of the first layer.
    assert backward == 2 * forward - 2 * 8 * 10 * 2 * 4 * 32 * 24
    second, back = flops("recurrent", "second")
    assert (second, back) == (2 * 8 * 10 * 3 * 16 * (64 + 16), 2 * 2 * 8 * 10 * 3 * 16 * (64 + 16))
    built, counts = counted("recurrent")
    made = {spec.name: spec for spec in built.traced.tensors}
    assert counts.tensor_bytes["first"] == 4 * 8 * 10 * 64 == made["first"].bytes(8)
    gates_and_cells, between, out = 5 * 2 * 2 * 32, 64, 64
    assert counts.saved_bytes["first"] >= 4 * 8 * 10 * (gates_and_cells + between + out)
    assert [work.kernels for work in counts.forward["first"] if work.kind == "recurrent"] == [10] * 4


def test_attention_never_writes_its_matrix_and_computes_half_of_it() -> None:
    _, counts = counted("attention")
    name = next(layer for layer in counts.forward if "attention" in layer)
    (work,) = counts.forward[name]
    assert work.flops == 0.5 * 2 * 2 * 4 * 2 * 128 * 128 * 8
    (back,) = counts.backward[name]
    assert back.flops == 2.5 * work.flops
    tensor = 4 * 2 * 4 * 128 * 8
    assert work.bytes == 4 * tensor
    # The output and one number a query; the inputs are one projection's.
    assert counts.saved_bytes[name] == 3 * tensor + tensor + 4 * 2 * 4 * 128


def test_sizes_are_those_that_are_measured() -> None:
    measured = profile_model(ref("residual"), ProfilerOptions(repeats=1, warmup=0, batches=(4,)))
    estimated = profile_model(ref("residual"), ProfilerOptions(device="v100", batches=(4, 6)))
    sizes = ("name", "module", "op", "parameter_bytes", "buffer_bytes", "saved_bytes")
    for one, other in zip(measured.layers, estimated.layers, strict=True):
        assert [getattr(one, size) for size in sizes] == [getattr(other, size) for size in sizes]
    assert measured.tensors == estimated.tensors
    assert (measured.together, measured.tied) == (estimated.together, estimated.tied)
    assert [size.minibatch for size in estimated.sizes] == [6]
    assert estimated.sizes[0].tensors[0].bytes == estimated.tensors[0].bytes * 6 // 4
    smaller = profile_model(ref("residual"), ProfilerOptions(device="v100", batches=(4,), halvings=3)).sizes
    assert [size.minibatch for size in smaller] == [1]
    assert estimated.provenance.kind == "modelled"
    said, *notes = estimated.provenance.notes
    assert said.startswith("the job has no loss and no data, so that it can be planned, but launch.sh cannot train it")
    assert tuple(notes) == V100.checked
    # A frozen layer has neither gradients nor an update.
    frozen = next(layer for layer in estimated.layers if layer.name == "stem")
    assert (frozen.backward_s, frozen.update_s) == (0.0, 0.0)
    assert frozen.parameter_bytes == 0 < frozen.frozen_bytes == frozen.buffer_bytes


def test_models_larger_than_memory_are_estimated_and_those_that_need_numbers_are_built_with_them_or_refused() -> None:
    profile, h100 = estimated("enormous", "h100"), devices.load_device("h100")
    assert profile.layers[0].parameter_bytes == 4 * (200_000 * 200_000 + 200_000)
    # SGD with momentum reads and writes five times the parameters.
    update = 5 * profile.layers[0].parameter_bytes / (h100.bandwidth.rate * h100.share.elementwise.memory)
    assert profile.layers[0].update_s == pytest.approx(update, rel=1e-3)
    assert "built on the CPU" in estimated("insists").provenance.notes[-1]
    tied = estimated("tied_with_data")
    assert [tie.layers for tie in tied.tied] == [("0", "1")]
    assert sum(layer.parameter_bytes for layer in tied.layers) == 4 * 4 * 4
    for job, says in (
        ("looks", "depends on the data"),
        ("each_loss", r"^the job's loss \(CrossEntropyLoss\) must return a tensor with one number, .* \(4,\): take"),
        ("constant_loss", r"^the job's loss \(lambda of .*\) does not depend on any parameter that can be trained$"),
        ("failing_loss", r"^the job's loss \(poisson_nll_loss\) failed: RuntimeError: .* \[1, 4\]$"),
    ):
        with pytest.raises(InputError, match=says) as caught:
            estimated(job, batches=(4,))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "names", [("grouped", "batched"), pytest.param(("default_experts", "batched_experts"), marks=pytest.mark.slow)]
)
def test_grouped_products_count_as_one_product_for_each_group(names: tuple[str, ...]) -> None:
    totals = []
    for name in names:
        _, counts = counted(name)
        assert not counts.uncounted, name
        ways = (counts.forward, counts.backward)
        totals.append([sum(work.flops for works in way.values() for work in works) for way in ways])
    assert totals[0] == totals[1]
    assert totals[0][0] > 0


INCOMPLETE = {
    "inverse": r"^the work of '.*' \(the operator linalg_inv_ex\) is not counted; measure on the device",
    "eager_experts": r"mlp.experts' \(opaque\) is not counted; make the model with experts_impl.*=\"batched_mm\"",
    "alone": r"^the work of '1' \(opaque\) is not counted; measure",
}


def test_what_is_not_counted_makes_the_profile_incomplete(tmp_path: Path) -> None:
    for job, says in INCOMPLETE.items():
        profile = estimated(job)
        assert re.search(says, profile.provenance.incomplete)
        profile.save(tmp_path / "profile.json")
        again = Profile.load(tmp_path / "profile.json")
        assert again.provenance.warning == profile.provenance.warning
        assert profile.provenance.warning.startswith("INCOMPLETE, all times are too short")
        assert not profile.work.flops
    (opaque,) = [layer for layer in profile.layers if layer.name == "1"]
    assert 0 < opaque.forward_s <= opaque.backward_s, "known by its bytes only"
    profile = estimated("mlp")
    assert (profile.provenance.warning, "incomplete" in profile.to_json()["provenance"]) == ("", False)


def test_torchs_log_of_an_operator_that_fails_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pipeplan.profiler.estimate.flops.WITHOUT_DATA", {})
    with pytest.raises(InputError, match=r"cannot be run on tensors .*; make the model with experts_impl") as caught:
        profile_model(ref("default_experts"), ProfilerOptions(device="v100"))
    assert "\n" not in str(caught.value)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert not capfd.readouterr().err


SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ["vgg16", "alexnet", "resnet50", "gnmt8", "gnmt16", "awd-lm", "s2vt"]
]


@pytest.mark.parametrize("name", ["mnist", *SLOW])
def test_bundled_profiles_are_what_their_script_makes(name: str) -> None:
    folder = ROOT / "profiles"
    spec = importlib.util.spec_from_file_location("v100", folder / "v100.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made, kept = script.build(name), Profile.load(folder / f"{name}-v100.json")
    assert (made.layers, made.tensors, made.together) == (kept.layers, kept.tensors, kept.together)
    assert script.text_of(kept).count("\n") < 400


def test_two_products_forward_and_three_backward() -> None:
    """The first product's input needs no gradient, so that the backward pass has one product less."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    samples = [(torch.randn(8), torch.tensor(index % 4)) for index in range(12)]
    job = Job(model, loss=nn.functional.cross_entropy, data=lambda: Data(samples), tokens_per_sample=8)
    first, second = 2 * 8 * 16, 2 * 16 * 4
    flops = (SampleFlops("matmul", "float32", first + second, first + 2 * second),)
    assert counted_work(job, trace_job(job, 6, "layer"), 6) == SampleWork(flops, 8, 12)


def test_times_are_the_roofline_with_transforms_where_they_are_faster_and_fit() -> None:
    share, a100 = V100.share.matmul, devices.load_device("a100")
    thick = Work("matmul", "float32", flops=1e12, bytes=1e6, sides=(128, 128))
    assert operator_seconds(thick, V100) == pytest.approx(V100.kernel.time + 1e12 / (15.7e12 * share.compute))
    thin = replace(thick, flops=1e6, bytes=9e9)
    assert operator_seconds(thin, V100) == pytest.approx(V100.kernel.time + 0.01 / share.memory)
    assert operator_seconds(Work("elementwise", "float32", kernels=3), V100) == pytest.approx(3 * V100.kernel.time)
    # A V100 has no bfloat16, and computes in float32; an A100 takes tf32 for convolutions, not for products.
    assert operator_seconds(replace(thick, arithmetic="bfloat16"), V100) == operator_seconds(thick, V100)
    fast, slow = (operator_seconds(replace(thick, kind=kind), a100) for kind in ("convolution", "matmul"))
    assert slow > 5 * fast
    other = TransformedWork(flops=1e11, bytes=9e8, workspace_bytes=1e9, sides=(64, 128))
    work = Work("convolution", "float32", flops=1e12, sides=(64, 128), transformed=other)
    direct = operator_seconds(replace(work, transformed=None), V100)
    assert operator_seconds(work, V100) < 0.25 * direct
    for worse in (replace(other, workspace_bytes=5e9), replace(other, bytes=9e11)):
        assert operator_seconds(replace(work, transformed=worse), V100) == direct
    # The tf32 of an A100's convolutions has none, and would have none beside a V100's for float32.
    both = msgspec.structs.replace(a100, transforms=V100.transforms)
    assert operator_seconds(work, both) == operator_seconds(replace(work, transformed=None), both)
    (work,) = counted("convolutions")[1].forward["1"]
    assert work.converted_bytes == 2 * 4 * 4 * (8 + 16) * 20 * 20, "tensor cores want channels last"
    extra = work.converted_bytes / (a100.bandwidth.rate * a100.share.elementwise.memory)
    last = replace(work, converted_bytes=0.0)
    assert operator_seconds(work, a100) == pytest.approx(operator_seconds(last, a100) + extra)
    assert operator_seconds(work, V100) == operator_seconds(last, V100)
