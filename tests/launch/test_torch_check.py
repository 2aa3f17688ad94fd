"""A torch that cannot be imported, in whole or in part, is told by name and not taken for a model's fault."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

from pipeplan_launch import torch_check


@pytest.mark.parametrize(
    ("broken", "said"),
    [("torch", "torch cannot be imported ("), ("torch._dynamo", "torch is broken: torch._dynamo cannot")],
)
def test_what_cannot_be_imported_is_named(broken: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def failing(name: str) -> ModuleType:
        if name == broken:
            raise OSError("libcudart.so.12:\ncannot open shared object file")
        return real(name)

    monkeypatch.setattr(torch_check.importlib, "import_module", failing)
    problem = torch_check.import_problem(torch_check.TRACING)
    assert problem is not None
    assert problem[0].startswith(said)
    assert problem[0].endswith("): libcudart.so.12: cannot open shared object file")


def test_nothing_is_wrong_with_the_torch_of_these_tests() -> None:
    assert torch_check.import_problem(torch_check.TRACING) is None
