"""An exported pipeline.py refuses, before training, the models that torch cuts but cannot run."""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any

import pytest
from decoders import chain, grid, problem

from pipeplan.exports.target import export_files, write_export
from pipeplan.exports.torch_pipelining import TARGET

pytestmark = pytest.mark.deploy


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The module for three stages, which begin before `b` and before `c`."""
    pytest.importorskip("torch")
    profile = chain(["a", "b", "c", "loss"])
    folder = tmp_path_factory.mktemp("exported")
    write_export(folder, export_files(TARGET, problem(profile), grid(profile, ["b", "c"])))
    spec = importlib.util.spec_from_file_location("exported_pipeline", folder / "pipeline.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def models() -> dict[str, Any]:
    """Models, each with the message that refuses it, or with none if it can run."""
    import torch
    from torch import Tensor, nn

    class Base(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    class Chain(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x)).relu())  # type: ignore[no-any-return]

    class Mask(Base):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.arange(4) % 2
            return self.c(self.b(self.a(x) * mask) * mask) * mask  # type: ignore[no-any-return]

    class Skip(Base):
        def forward(self, x: Tensor) -> Tensor:
            early = self.a(x)
            return self.c(self.b(early).relu()) + early  # type: ignore[no-any-return]

    class Late(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.a(x)).relu() + x)  # type: ignore[no-any-return]

    class Twice(Base):
        def forward(self, x: Tensor) -> Tensor:
            return self.c(self.b(self.b(self.a(x))))  # type: ignore[no-any-return]

    class Pair(Base):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            found = self.c(self.b(self.a(x)))
            return found, found.sum()

    return {
        "chain": (Chain, None),
        "mask": (Mask, "stage 3 reads what stage 1 makes"),
        "skip": (Skip, "stage 3 reads what stage 1 makes"),
        "late": (Late, r"stage \d reads the model's input 'x'"),
        "twice": (Twice, "cut into 4 stages, not 3"),
        "pair": (Pair, "more than one tensor"),
    }


@pytest.mark.parametrize("name", ["chain", "mask", "skip", "late", "twice", "pair"])
def test_models_that_torch_cuts_but_cannot_run_end_in_one_line(exported: ModuleType, name: str) -> None:
    import torch
    from torch.distributed.pipelining import pipeline

    model, words = models()[name]
    pipe = pipeline(model(), (torch.zeros(2, 4),), split_spec=exported.SPLIT_SPEC)
    if words is None:
        exported.check(pipe)
        return
    with pytest.raises(SystemExit, match=words) as ended:
        exported.check(pipe)
    assert "\n" not in str(ended.value)
