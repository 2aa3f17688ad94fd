"""Stages run one after the other are the model, bit by bit, also under autocast. Compiled stages are close to it."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
import traced_zoo
import traced_zoo_whole
from extents import slow_but_for
from stagewise import BATCH, check_evaluation, check_training, programs, random_pipeline
from torch import Tensor, nn
from traced_zoo import build

from pipeplan_launch import Job
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.tracing import compiled
from pipeplan_launch.tracing.split import StageProgram, build_stage_program
from pipeplan_launch.tracing.trace import TracedModel, trace_job

SLOW = {"cells", "translator", "unet", "gpt", "resnet-tiny"}
MIXED = (
    "mnist",
    "resnet-tiny",
    "gpt",
    "translator",
    "regions",
    "shared",
    "two-towers",
    "routes",
    "routed",
    "adversary",
)
CASES = [(name, "layer") for name in traced_zoo.ZOO] + [(name, "bfloat16") for name in (*MIXED, "routed", "adversary")]
CASES += [(name, layers) for name in (*traced_zoo.ZOO, *traced_zoo_whole.ZOO) for layers in ("module", "op")]
QUICK = [(name, "layer") for name in {*traced_zoo.ZOO} - SLOW] + [("gpt", "op"), ("keeps-state", "module")]
QUICK += [(name, "bfloat16") for name in ("regions", "shared", "routes", "adversary")]


def mixed(name: str) -> Job:
    zoo = traced_zoo_whole if name in traced_zoo_whole.ZOO else traced_zoo
    return replace(zoo.build(name), autocast=torch.bfloat16)


@pytest.mark.parametrize("case", slow_but_for(QUICK, CASES), ids="-".join)
def test_split_equals_whole(case: tuple[str, str]) -> None:
    """Training, its gradients, and evaluation, for random cuts and two sizes of a minibatch."""
    name, layers = case
    job = mixed(name) if layers == "bfloat16" else replace(mixed(name), autocast=None)
    traced = trace_job(job, BATCH, "layer" if layers == "bfloat16" else layers)
    check_graph(traced)
    assert any(spec.dtype is torch.bfloat16 for spec in traced.tensors) or layers != "bfloat16"
    for seed in range(3):
        stages = programs(traced, random_pipeline(traced, stages=2 + seed, seed=seed))
        check_training(name, job, stages, BATCH)
        if traced.dynamic_batch and not seed:
            check_training(name, job, stages, BATCH + 3)
        check_evaluation(name, job, stages, BATCH)


def check_graph(traced: TracedModel) -> None:
    """Every layer comes after what it reads, names are different, and every parameter is in a layer."""
    place = {layer.name: index for index, layer in enumerate(traced.layers)}
    assert len(place) == len(traced.layers)
    assert len({tensor.name for tensor in traced.tensors}) == len(traced.tensors)
    for tensor in traced.tensors:
        assert all(place[tensor.producer] < place[consumer] for consumer in tensor.consumers)
    used = {parameter for layer in traced.layers for parameter in layer.parameters}
    assert used == {parameter for parameter, _ in traced.model.named_parameters()}


@pytest.mark.parametrize(
    "name", slow_but_for(["routes", "two-towers"], ["routes", "regions", "two-towers", "unet", "translator", "experts"])
)
def test_a_smaller_last_minibatch_at_every_cut(name: str) -> None:
    job = build(name)
    traced = trace_job(job, BATCH)
    names = [layer.name for layer in traced.layers]
    cuts = 0
    for at in range(1, len(names)):
        before = set(names[:at])
        if all(before.issuperset(group) or before.isdisjoint(group) for group in traced.together):
            cuts += 1
            for batch in (1, 4):
                check_training(name, job, programs(traced, [names[:at], names[at:]]), batch)
    assert cuts > 2


MNIST = [["conv1", "relu"], ["conv2", "relu#2", "fc1", "relu#3", "fc2"], ["relu#4", "out", "loss"]]


def test_a_stage_holds_its_own_parameters_only() -> None:
    first, second, third = programs(trace_job(build("mnist"), BATCH), MNIST)
    assert list(first.parameters_by_name()) == ["conv1.weight", "conv1.bias"]
    assert list(dict(third.named_parameters())) == ["out.weight", "out.bias"]
    assert set(second.state_dict()) == {
        f"{layer}.{kind}" for layer in ("conv2", "fc1", "fc2") for kind in ("weight", "bias")
    }
    assert [one.name for one in first.sends] == [one.name for one in second.receives] == ["relu"]
    assert (first.model_inputs, second.model_inputs, third.sends) == ((0,), (), ())


def test_parameters_are_the_models_own_objects_and_others_can_be_given() -> None:
    job = build("mnist")
    stage = build_stage_program(trace_job(job, BATCH), [[layer for stage in MNIST for layer in stage]], 0)
    for name, parameter in job.model.named_parameters():
        assert stage.parameters_by_name()[name] is parameter
    x = torch.ones(2, 1, 28, 28)
    zeros = {name: torch.zeros_like(one) for name, one in stage.parameters_by_name().items()}
    assert not stage.call(zeros, [], [x], 2).any()
    assert stage([], [x], 2).any()


def test_relayed_tensors_pass_through() -> None:
    job = build("resnet-tiny")
    traced = trace_job(job, BATCH)
    names = [layer.name for layer in traced.layers]
    first, last = names.index("stages.0.0.conv1"), names.index("stages.0.0.add")
    stages = [names[:first], names[first:last], names[last:]]
    middle = build_stage_program(traced, stages, 1)
    assert [one.name for one in middle.receives] == ["relu"]
    assert [one.name for one in middle.sends] == ["relu", "stages.0.0.bn2"]
    skip = torch.randn(BATCH, 16, 32, 32)
    assert middle.call(middle.parameters_by_name(), [skip], [], BATCH)[0] is skip


def test_a_stage_of_the_loss_alone_returns_the_output() -> None:
    traced = trace_job(build("two-towers"), BATCH)
    names = [layer.name for layer in traced.layers]
    last = build_stage_program(traced, [names[:-1], ["loss"]], 1)
    assert last.model_inputs == (1,)
    received = [torch.zeros(spec.shape(BATCH)) for spec in last.receives]
    given = torch.ones(BATCH, 3)
    output = last.call({}, received, [given], BATCH)
    assert set(output) == {"product", "parts", "given", "nothing"}
    assert output["given"] is given
    assert output["nothing"] is None
    assert isinstance(output["parts"], tuple)


def test_constants_follow_the_device() -> None:
    traced = trace_job(build("regions"), BATCH)
    stage = build_stage_program(traced, [[layer.name for layer in traced.layers]], 0, device="meta")
    assert stage([], [torch.randn(BATCH, 6, device="meta")], BATCH).device.type == "meta"
    assert {one.device.type for one in stage.parameters()} == {"meta"}


def test_non_persistent_buffers_stay_out_of_checkpoints() -> None:
    traced = trace_job(build("keeps-state"), BATCH)
    stage = build_stage_program(traced, [[layer.name for layer in traced.layers]], 0)
    assert "scale" in stage.buffers_by_name()
    assert "scale" not in stage.state_dict()
    assert "seen" in stage.state_dict()


def test_pipelines_that_do_not_fit_are_refused() -> None:
    traced = trace_job(build("mnist"), BATCH)
    names = [layer.name for layer in traced.layers]
    for pipeline, says in (
        ([names[:3], [*names[3:], "conv9"]], "stage 1 names .* 'conv9': did you mean 'conv"),
        ([names[:3], names[2:]], "layer 'conv2' is in stage 0 and again in stage 1"),
        ([names[:3], names[4:]], "no stage holds layer 'relu#2'"),
        ([names[3:-1], [*names[:3], "loss"]], "layer 'relu#2' in stage 0 reads .* 'conv2' in a later stage"),
        ([[*names[:3], "loss"], names[3:-1]], "'loss' must be in the last stage"),
    ):
        with pytest.raises(LaunchError, match=says):
            build_stage_program(traced, pipeline, 0)


def test_what_crosses_a_cut_is_half_as_large() -> None:
    plain, half = trace_job(build("resnet-tiny"), BATCH), trace_job(mixed("resnet-tiny"), BATCH)
    assert [one.name for one in plain.tensors] == [one.name for one in half.tensors]
    assert all(
        2 * one.bytes(BATCH) == other.bytes(BATCH) for one, other in zip(half.tensors, plain.tensors, strict=True)
    )
    assert half.graph_hash != plain.graph_hash


def test_other_precisions_are_refused() -> None:
    for dtype, says in (
        (torch.float16, "needs its losses scaled"),
        (torch.float64, "must be torch.bfloat16"),
        ("bf16", "not 'bf16'"),
    ):
        with pytest.raises(LaunchError, match=says):
            Job(nn.Linear(2, 2), inputs=lambda n: torch.ones(n, 2), autocast=dtype)


CPU = torch.device("cpu")


def _stage() -> StageProgram:
    """The first of two stages; its BatchNorm writes its buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))
    traced = trace_job(Job(model, inputs=lambda n: torch.randn(n, 6)), 4, "layer")
    return build_stage_program(traced, [["0", "1", "2"], ["3", "loss"]], 0)


def _step(stage: StageProgram, inputs: Tensor) -> list[Tensor]:
    (made,) = stage((), [inputs], len(inputs))
    made.square().sum().backward()
    gradients = [parameter.grad for parameter in stage.parameters() if parameter.grad is not None]
    stage.eval()
    with torch.no_grad():
        (evaluated,) = stage((), [inputs], len(inputs))
    stage.train()
    return [made, evaluated, *gradients, *stage.buffers_by_name().values()]


@pytest.mark.parametrize("backend", slow_but_for(["aot_eager"], ["aot_eager", "inductor"]))
def test_a_compiled_stage_trains_and_evaluates_as_the_stage_does(backend: str) -> None:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a C++ compiler")
    plain, stage = _stage(), _stage()
    stage.compile_with(backend)
    for samples in (4, 3):  # the last minibatch of an epoch is shorter
        inputs = torch.randn(samples, 6)
        for ours, theirs in zip(_step(stage, inputs), _step(plain, inputs), strict=True):
            # Inductor fuses operators, so that sums of float32 run in another order. A norm of three or four samples
            # divides by small deviations, which multiplies the rounding.
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        LaunchError, match=r"--compile-backend: torch.compile has no backend 'inducter' here, only .*in"
    ):
        compiled.check_compiler("inducter", CPU)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", _raises)
    with pytest.raises(LaunchError, match=r"^--compile needs a C\+\+ compiler .* leave it out"):
        compiled.check_compiler("inductor", CPU)
    torch._dynamo.reset()
    run = compiled.compiled_function(lambda x: x + 1, _raises)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=r"torch.compile fails on this stage .*leave out --compile"):
        run(torch.ones(2))


def _raises(*_: object) -> str:
    raise RuntimeError("No working C++ compiler found")
