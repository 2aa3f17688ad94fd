"""References to models: what they find, and what is said when they find nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeplan_launch import Job, load_job
from pipeplan_launch.errors import LaunchError

JOB_FILE = """
import torch
from torch import nn
from helper_beside_it import WIDTH
from pipeplan_launch import Job

class Net(nn.Linear):
    pass

def make():
    return Job(Net(WIDTH, 2), inputs=lambda n: torch.randn(n, WIDTH))

def with_example():
    model = nn.Linear(3, 2)
    model.example_input_array = torch.zeros(1, 3)
    return model

def with_keywords():
    model = nn.Linear(3, 2)
    model.example_input_array = {"input": torch.zeros(1, 3)}
    return model

def wrong():
    return {"model": 1}

def fails():
    raise ValueError("two\\nlines")

def leaves():
    raise SystemExit(3)
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "helper_beside_it.py").write_text("WIDTH = 3\n")
    path = tmp_path / "my jobs.py"
    path.write_text(JOB_FILE)
    return path


def test_a_function_of_a_file_or_of_a_module_builds_the_job(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = load_job(f"{job_file}:make", seed=1)
    assert type(job.model).__name__ == "Net"
    assert job.name == "my jobs:make"
    assert job.example_inputs(4)[0].shape == (4, 3)
    again, other = (load_job(f"{job_file}:make", seed).model for seed in (1, 2))
    assert torch.equal(job.model.weight, again.weight)
    assert not torch.equal(job.model.weight, other.weight)
    (tmp_path / "package_of_jobs").mkdir()
    source = JOB_FILE.replace("from helper_beside_it import", "WIDTH = 3 #")
    (tmp_path / "package_of_jobs" / "inner.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert isinstance(load_job("package_of_jobs.inner:make", seed=1), Job)


def test_bare_module_with_example_inputs(job_file: Path) -> None:
    for name in ("with_example", "with_keywords"):
        job = load_job(f"{job_file}:{name}", seed=0)
        assert job.example(5).call(job.model).shape == (5, 2)


def test_examples_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "job.py"
    for example in ("torch.tensor(3.0)", "'x'", "torch.zeros(0, 3)", "(torch.zeros(1, 3), 3)", "()"):
        path.write_text(
            "import torch\ndef make():\n    model = torch.nn.Linear(3, 2)\n"
            f"    model.example_input_array = {example}\n    return model\n"
        )
        with pytest.raises(LaunchError, match="must be a tensor of at least one sample"):
            load_job(f"{path}:make", seed=0)


def test_errors_that_docs_errors_md_does_not_have(job_file: Path) -> None:
    for ref, says in (
        ("mnits", "did you mean 'mnist'"),
        ("resnet5", "'resnet50'"),
        ("{file}:wrong", "returned dict: it must return a torch.nn.Module or a Job"),
        ("{file}:fails", 'ValueError: two lines ({file}:27: raise ValueError("two\\nlines"))'),
        ("{file}:leaves", "SystemExit: 3"),
        ("no_such_package.module:make", "there is no module 'no_such_package.module'"),
        ("json:lods", "did you mean 'loads'"),
        (":make", "is not a model"),
        ("", "there is no bundled model ''"),
        ("$(touch owned)", "there is no bundled model '$(touch owned)'"),
        ("a\nb", "there is no bundled model 'a\\nb'"),
    ):
        with pytest.raises(LaunchError) as caught:
            load_job(ref.replace("{file}", str(job_file)), seed=0)
        assert says.replace("{file}", str(job_file)) in str(caught.value)
        assert "\n" not in str(caught.value)


def test_error_while_importing(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("x = 1\nimport no_such_library\n")
    says = r"No module named 'no_such_library' \(.*broken.py:2: import no_such_library\)"
    with pytest.raises(LaunchError, match=says):
        load_job(f"{broken}:make", seed=0)


def test_package_root_needs_no_torch() -> None:
    code = "import sys, pipeplan_launch, pipeplan_launch.job.bundled_models; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
