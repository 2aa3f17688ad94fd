"""Stages run one after the other are the model, bit for bit."""

from __future__ import annotations

import pytest
import torch
from extents import slow_but_for
from stagewise import (
    BATCH,
    check_evaluation,
    check_training,
    programs,
    random_pipeline,
)
from traced_zoo import ZOO, build

from pipeplan_launch import Job
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.tracing.split import build_stage_program
from pipeplan_launch.tracing.trace import trace_job


@pytest.mark.parametrize("name", slow_but_for({*ZOO} - {"cells", "translator", "unet"}, ZOO))
def test_split_equals_whole(name: str) -> None:
    job = build(name)
    traced = trace_job(job, BATCH)
    batches = [BATCH, BATCH + 3] if traced.dynamic_batch else [BATCH]
    for seed in range(4):
        pipeline = random_pipeline(traced, stages=2 + seed, seed=seed)
        stages = programs(traced, pipeline)
        for batch in batches:
            check_training(name, job, stages, batch)
        check_evaluation(name, job, stages, batches[-1])


def program_of(name: str, *stages: list[str]):
    traced = trace_job(build(name), BATCH)
    return [build_stage_program(traced, stages, index) for index in range(len(stages))]


MNIST = [["conv1", "relu"], ["conv2", "relu#2", "fc1", "relu#3", "fc2"], ["relu#4", "out", "loss"]]


def test_a_stage_holds_its_own_parameters_only() -> None:
    first, second, third = program_of("mnist", *MNIST)
    assert list(first.parameters_by_name()) == ["conv1.weight", "conv1.bias"]
    assert list(dict(third.named_parameters())) == ["out.weight", "out.bias"]
    assert set(second.state_dict()) == {
        f"{layer}.{kind}" for layer in ("conv2", "fc1", "fc2") for kind in ("weight", "bias")
    }
    assert [one.name for one in first.sends] == [one.name for one in second.receives] == ["relu"]
    assert (first.model_inputs, second.model_inputs, third.sends) == ((0,), (), ())


def test_parameters_are_the_models_own_objects() -> None:
    job = build("mnist")
    stage = build_stage_program(trace_job(job, BATCH), [[layer for stage in MNIST for layer in stage]], 0)
    for name, parameter in job.model.named_parameters():
        assert stage.parameters_by_name()[name] is parameter


def test_other_parameters_can_be_given() -> None:
    first, *_ = program_of("mnist", *MNIST)
    x = torch.ones(2, 1, 28, 28)
    zeros = {name: torch.zeros_like(one) for name, one in first.parameters_by_name().items()}
    (out,) = first.call(zeros, [], [x], 2)
    assert not out.any()
    assert first([], [x], 2)[0].any()


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


def test_buffers_that_only_batches_of_training_move() -> None:
    (stage,) = program_of("resnet-tiny", [layer.name for layer in trace_job(build("resnet-tiny"), BATCH).layers])
    x = torch.randn(BATCH, 3, 32, 32)
    stage.train()([], [x], BATCH)
    stage.eval()([], [x], BATCH)
    assert stage.buffers_by_name()["bn.num_batches_tracked"] == 1


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


class Doubles(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if self.training else y


def test_refuses_to_evaluate_what_it_cannot() -> None:
    traced = trace_job(Job(Doubles(2, 2), inputs=lambda n: torch.randn(n, 2)), BATCH)
    stage = build_stage_program(traced, [[layer.name for layer in traced.layers]], 0)
    stage.train()
    with pytest.raises(LaunchError, match="Doubles does other work in evaluation mode"):
        stage.eval()


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("mnist", lambda names: [names[:3], [*names[3:], "conv9"]], "stage 1 names .* 'conv9': did you mean 'conv"),
        ("mnist", lambda names: [names[:3], names[2:]], "layer 'conv2' is in stage 0 and again in stage 1"),
        ("mnist", lambda names: [names[:3], names[4:]], "no stage holds layer 'relu#2'"),
        (
            "mnist",
            lambda names: [names[3:-1], [*names[:3], "loss"]],
            "layer 'relu#2' in stage 0 reads .* 'conv2' in a later stage",
        ),
        ("mnist", lambda names: [[*names[:3], "loss"], names[3:-1]], "'loss' must be in the last stage"),
    ],
)
def test_pipelines_that_do_not_fit(name: str, change, says: str) -> None:
    traced = trace_job(build(name), BATCH)
    with pytest.raises(LaunchError, match=says):
        build_stage_program(traced, change([layer.name for layer in traced.layers]), 0)


def test_inputs_of_another_shape_are_refused() -> None:
    """The graph has no guards, and the stages after it would wait for tensors of other sizes."""
    stage, *_ = program_of("mnist", *MNIST)
    stage([], [torch.ones(3, 1, 28, 28)], 3)
    for shape, written in (((3, 1, 28, 14), "3×1×28×14"), ((4, 1, 28, 28), "4×1×28×28")):
        with pytest.raises(LaunchError, match=f"input 0 of the model is {written} for 3 samples, and was 3×1×28×28"):
            stage([], [torch.ones(shape)], 3)
