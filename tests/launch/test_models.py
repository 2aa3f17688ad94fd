"""The bundled models: sizes as in the papers, data in the right shapes."""

from __future__ import annotations

import pytest
import torch

from pipeplan_launch import load_job
from pipeplan_launch.models import BUNDLED
from pipeplan_launch.models.generated import GeneratedImages

# VGG-16, ResNet-50 and AlexNet: as torchvision and the published profiles have them (4 bytes a parameter).
PARAMETERS = {
    "mnist": 369_258,
    "vgg16": 138_357_544,
    "resnet50": 25_557_032,
    "alexnet": 61_100_840,
    "resnet-tiny": 78_042,
}


@pytest.mark.parametrize("name", BUNDLED)
def test_parameters(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.init, "kaiming_uniform_", lambda tensor, *args, **options: tensor)
    job = load_job(name, seed=0)
    assert sum(one.numel() for one in job.model.parameters()) == PARAMETERS[name]
    assert job.name == name
    assert job.example_inputs(2)[0].shape == job.example_batch(2).inputs[0].shape


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


def test_generated_images_are_the_same_every_time() -> None:
    one, two = (GeneratedImages(5, (1, 2, 2), classes=3, seed=1) for _ in range(2))
    assert torch.equal(one[4][0], two[4][0])
    assert one[4][1] == 1
    assert not torch.equal(one[3][0], one[4][0])
    assert len(one) == 5
    with pytest.raises(IndexError):
        one[5]
