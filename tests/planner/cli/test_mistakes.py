"""What people do wrong on the command line: the lines of docs/errors.md are the lines that they get."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from commandline import Run
from repository import ROOT

import pipeplan
from pipeplan.cluster_data.devices import device_mismatch
from pipeplan.cluster_data.local import local_cluster
from pipeplan.first_steps import init
from pipeplan.planning.outcome import Outcome
from pipeplan.planning.settings import Settings
from pipeplan.planning.solve import solve
from pipeplan.problem.problem import Problem
from pipeplan.profile_data.layers import Layer, Provenance, Tensor
from pipeplan.profile_data.profile import Profile

PAGE = ROOT / "docs" / "errors.md"
TEXT = PAGE.read_text(encoding="utf-8") + (ROOT / "tests" / "support" / "more_mistakes.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| ([^|`]+?) +\| `([^`]+)` +\| `([^`]+)` +\|$", re.MULTILINE)
ROWS = {mistake: (typed, said) for mistake, typed, said in ROW.findall(TEXT)}
HERE = [name for name, (typed, _) in ROWS.items() if typed.startswith("pipeplan ") and "Ctrl-C" not in name]
ELSEWHERE = {"torch is missing", "torch is old", "torch cannot be imported", "a full disk"}
QUICK = {"the answer over the job"}
"""Of those that are told to `pipeplan profile`: torch need not be imported for it."""


def data_job(before: str, data: str) -> str:
    """The text of a job file with this data, which stands after some code of its own."""
    return f"""import random
import torch
from pipeplan_launch import Data, Job

{before}

class Mean(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x.mean(1, keepdim=True))

def build():
    loss = torch.nn.functional.cross_entropy
    return Job(Mean(1, 2), loss=loss, data=lambda: Data({data}))
"""


def net_job(body: str, given: str = "inputs=lambda n: torch.rand(n, 2)", model: str = "Net(2, 2)") -> str:
    """The text of a job file whose model is a linear layer with methods of its own, which begin in line 5."""
    head = "import torch\nfrom pipeplan_launch import Data, Job\n\nclass Net(torch.nn.Linear):\n"
    return f"{head}{textwrap.indent(body, '    ')}\n\ndef build():\n    return Job({model}, {given})\n"


SAMPLES = "data=lambda: Data(torch.utils.data.TensorDataset(torch.rand(64, 2), torch.rand(64, 2)))"
NET = """import torch
from torch.nn import functional
from pipeplan_launch import Data, Job

def data():
    return Data(torch.utils.data.TensorDataset(torch.rand(64, 4), torch.randint(3, (64,))))

def build():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    loss, more = functional.cross_entropy, {}
    CHANGE
    return Job(model, loss=loss, data=data, **more)
"""
"""A job file, but for one line."""
CHANGES = {
    "counts.py": "state = []; loss = lambda output, y: state.append(1) or functional.cross_entropy(output, y)",
    "loose.py": "scale = torch.nn.Parameter(torch.ones(3)); loss = lambda output, target: (output * scale).mean()",
    "decays.py": "loss = lambda output, target: output.mean() + model[0].weight.square().sum()",
    "hooks.py": "model[0].register_full_backward_hook(lambda *_: None)",
    "accumulates.py": "model[0].weight.register_post_accumulate_grad_hook(lambda _: None)",
    "lbfgs.py": "more = {'optimizer': torch.optim.LBFGS}",
    "sparse.py": "more = {'optimizer': torch.optim.SparseAdam}",
}
FILES = {
    **{name: NET.replace("CHANGE", line) for name, line in CHANGES.items()},
    "typo.py": "import torch\ndef build(:\n    pass\n",
    "name.py": "import torch\n\ndef build():\n    return Jobb(torch.nn.Linear(2, 2))\n",
    "bare.py": "import torch\n\ndef build():\n    return torch.nn.Linear(2, 2)\n",
    "decides.py": net_job(
        "def forward(self, x):\n    if x.sum() > 0:\n        return x\n    return super().forward(x)",
        "inputs=lambda n: torch.rand(n, 2), loss=torch.nn.functional.mse_loss",
    ),
    "noisy.py": data_job(
        "class Noisy(list):\n    own = random.Random(0)\n    def __getitem__(self, index):\n"
        "        return torch.full((2,), self.own.random()), index % 2\n",
        "Noisy(range(64))",
    ),
    "mixes.py": data_job(
        "own = random.Random(0)\ndef mix(samples):\n    inputs, targets = torch.utils.data.default_collate(samples)\n"
        "    return inputs + own.random(), targets\n",
        "[(torch.zeros(2), 0)] * 64, collate=mix",
    ),
    "shuffles.py": data_job(
        "own = random.Random(0)\n", "[(torch.zeros(2), 0)] * 64, order=lambda epoch: own.sample(range(64), 64)"
    ),
    "lengths.py": data_job("", "[(torch.zeros(3 + index % 2), 0) for index in range(64)]"),
    "padded.py": data_job(
        "def pad(samples):\n    inputs, targets = zip(*samples)\n"
        "    return torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True), torch.tensor(targets)\n",
        "[(torch.zeros(4 + index // 40), 0) for index in range(64)], collate=pad, order=lambda epoch: range(64)",
    ),
    "stream.py": data_job(
        "class Stream(torch.utils.data.IterableDataset):\n    def __iter__(self):\n        return iter([])\n",
        "Stream()",
    ),
    "script.py": net_job("pass", model="torch.jit.script(torch.nn.Linear(2, 2))"),
    "averaged.py": net_job("pass", model="torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2))"),
    "steps.py": net_job(
        "steps = 0\ndef forward(self, x):\n    self.steps += 1\n    return super().forward(x) / self.steps"
    ),
    "grows.py": net_job(
        "def __init__(self):\n    super().__init__(2, 2)\n    self.register_buffer('seen', torch.zeros(4))\n"
        "def forward(self, x):\n    self.seen = torch.cat([self.seen, self.seen])\n    return super().forward(x)",
        model="Net()",
    ),
    "energy.py": net_job(
        "def forward(self, x):\n    return torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)[0]",
        "inputs=lambda n: torch.rand(n, 2).requires_grad_()",
    ),
    "deep.py": """import torch
from pipeplan_launch import Job

def build():
    model = torch.nn.Linear(2, 2)
    for _ in range(1500):
        model = torch.nn.Sequential(model)
    return Job(model, inputs=lambda n: torch.rand(n, 2))
""",
    "entropy.py": "import os\n"
    + net_job(
        "def forward(self, x):\n    return super().forward(x) * (1 + int.from_bytes(os.urandom(4), 'big'))",
        f"{SAMPLES}, loss=torch.nn.functional.mse_loss",
    ),
}
ABSENT = """
import importlib.machinery as machinery
find = machinery.PathFinder.find_spec
machinery.PathFinder.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
"""
"""A sitecustomize.py that has this interpreter find no torch."""


def matches(said: str, line: str) -> bool:
    """Whether a line is what the page says, whose quotes stand for backticks, and … for what differs."""
    pattern = ".*".join(re.escape(part) for part in said.split("…"))
    return re.fullmatch(pattern.replace("`", "'"), line.replace("`", "'")) is not None


def small_profile(device: str | None = None, name: str = "") -> Profile:
    """Two layers, measured on this machine unless told otherwise."""
    here = local_cluster(2).device
    layers = tuple(Layer(one, 1e-3, 2e-3, 4096, 4096) for one in ("first", "loss"))
    made = Provenance("measured", here.kind if device is None else device, here.name if device is None else name)
    hidden = Tensor("first", "first", ("loss",), 4096, 4096)
    return Profile(layers, (hidden,), 32, model_name="small", model_ref="job.py:build", provenance=made)


CARD = 'kind = "cuda"\nmemory = "16 GiB"\n'
LEVELS = '[[level]]\nname = "server"\ncount = 1\n[[level]]\nname = "cluster"\ncount = 2\nbandwidth = '
TWO = "".join(f'[[device]]\nname = "{name}"\n{CARD}' for name in "ab")
TWO += '[[server]]\ndevices = ["a", "b"]\nbandwidth = "1 GB/s"\n'
ABOVE = '[[level]]\nname = "cluster"\nbandwidth = "1 GB/s"\n'
CLUSTERS = {
    "bare.toml": f'[device]\nname = "V100"\n{CARD}{LEVELS}16\n',
    "reserve.toml": f'[device]\nname = "V100"\n{CARD}memory_reserve = "60%"\n{LEVELS}"16 GB/s"\n',
    "both.toml": f'{TWO}device = "a"\n{ABOVE}',
    "uneven.toml": f'{TWO}[[server]]\ndevice = "a"\ndevices = 1\n{ABOVE}',
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What docs/errors.md says that there is."""
    folder = tmp_path_factory.mktemp("mistakes")
    init.write_starter_files(folder, init.starter_files())
    small_profile().save(folder / "profile.json")
    pipeplan.render(pipeplan.solve(small_profile(), pipeplan.cluster("local", workers=2)), folder / "plan")
    shutil.copytree(folder / "plan", folder / "used")
    (folder / "used" / "runs" / "20260131T120000Z").mkdir(parents=True)
    job = (folder / "job.py").read_text()
    (folder / "called.py").write_text(job.replace("data=spirals,", "data=spirals(),"))
    (folder / "made.py").write_text(
        job.replace("lambda parameters: ", "").replace("(parameters, ", "(Net().parameters(), ")
    )
    for name, text in FILES.items():
        (folder / name).write_text(text)
    text = (folder / "profile.json").read_text()
    head, _, rest = text.rpartition('"forward_s": 0.001')
    (folder / "edited.json").write_text(f'{head}"forward_s": "fast"{rest}')
    (folder / "cut.json").write_text(text[: len(text) // 2])
    for name, text in CLUSTERS.items():
        (folder / name).write_text(f'format = "pipeplan-cluster"\nversion = 1\nname = "{Path(name).stem}"\n{text}')
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """Every file, but what Python makes of a job."""
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_the_page_has_a_row_for_every_kind_of_mistake() -> None:
    assert len(ROWS) == len(ROW.findall(TEXT)) >= 35
    _, _, messages = TEXT.partition("## Files")
    tables = [line for line in messages.splitlines() if line.startswith("| ")]
    assert len(tables) == len(ROWS) + sum(line.startswith("| mistake ") for line in tables), "a row was not understood"


def slow(mistake: str) -> bool:
    return ROWS[mistake][0].startswith("pipeplan profile") and mistake not in QUICK


@pytest.mark.parametrize(
    "mistake", [pytest.param(one, marks=pytest.mark.slow if slow(one) else ()) for one in HERE if one not in ELSEWHERE]
)
def test_a_mistake_gets_its_line_and_leaves_nothing(
    mistake: str, prepared: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    typed, said = ROWS[mistake]
    before = content(tmp_path)
    done = run(*typed.split()[1:])
    *others, line = done.err.splitlines()
    assert done.code == 2
    assert matches(f"error: {said}", line), line
    assert others == []
    assert done.out == ""
    assert content(tmp_path) == before


PATHS = {
    "torch is missing": {"sitecustomize.py": ABSENT},
    "torch is old": {
        "torch/__init__.py": "from torch.version import __version__\n",
        "torch/version.py": "__version__ = '2.1.0'\n",
    },
    "torch cannot be imported": {
        "torch/__init__.py": "raise ImportError('libcudart.so.12: cannot open shared object file')"
    },
}
"""Files of a folder on the path in which Python finds no torch, one of another time, or one that lacks a library."""


@pytest.mark.parametrize(
    "mistake", [pytest.param(one, marks=pytest.mark.slow if "old" in one else ()) for one in PATHS]
)
def test_without_the_torch_that_is_needed(mistake: str, tmp_path: Path) -> None:
    for name, text in PATHS[mistake].items():
        (tmp_path / "path" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "path" / name).write_text(text)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "path")}
    typed, said = ROWS[mistake]
    init.write_starter_files(tmp_path / "work", init.starter_files())
    done = subprocess.run(
        [sys.executable, "-m", *typed.split()], cwd=tmp_path / "work", capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2
    assert matches(f"error: {said}", done.stderr.strip()), done.stderr
    assert sorted(os.listdir(tmp_path / "work")) == ["cluster.toml", "job.py"]


def test_a_full_disk_gets_its_line_and_no_part_of_a_plan(prepared: Path, tmp_path: Path) -> None:
    """The folder `full` is a disk with room for very little."""
    inside = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], capture_output=True).returncode:
        pytest.skip("needs unshare, and namespaces for all users")
    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    (tmp_path / "full").mkdir()
    typed, said = ROWS["a full disk"]
    command = f"{sys.executable} -m {typed}"
    script = f"mount -t tmpfs -o size=8k none full && {command}; status=$?; find full -mindepth 1; exit $status"
    done = subprocess.run([*inside, script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert matches(f"error: {said}", done.stderr.strip())


def interrupted(typed: str, folder: Path, ready: Callable[[str], bool]) -> tuple[int, str]:
    """(status, standard error) of a command that gets Ctrl-C as soon as `ready`, which is given that error so far."""
    with (folder / "errors").open("w") as errors:
        started = subprocess.Popen(
            [sys.executable, "-m", *typed.split()],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )
    deadline = time.monotonic() + 60
    while not ready((folder / "errors").read_text()) and started.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(started.pid, signal.SIGINT)
    return started.wait(60), (folder / "errors").read_text()


@pytest.mark.slow
def test_ctrl_c_while_a_model_is_measured(tmp_path: Path) -> None:
    init.write_starter_files(tmp_path, init.starter_files())
    mark = tmp_path / "began"
    job, end = tmp_path / "job.py", "    return Job(\n"
    job.write_text(job.read_text().replace(end, f"    open({str(mark)!r}, 'w').close()\n{end}"))
    typed, said = ROWS["Ctrl-C while a model is measured"]
    ended = interrupted(f"{typed} --repeats 9999", tmp_path, lambda _: mark.exists())
    assert ended == (130, f"error: {said}\n")
    assert not (tmp_path / "profile.json").exists()


@pytest.mark.slow
def test_ctrl_c_while_a_plan_is_sought(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # says that the profile is being read
    typed = "pipeplan solve resnet50-v100 --cluster A --servers 16 --solver ilp -o new"
    status, errors = interrupted(typed, tmp_path, lambda said: "pipeplan.profile_data.profile\n" in said)
    assert status == 130
    assert errors.splitlines()[-1].startswith("error: interrupted")
    if (tmp_path / "new").exists():
        assert "Ctrl-C" in (tmp_path / "new" / "plan.json").read_text()


def test_a_plan_that_ctrl_c_cut_short_is_written_and_no_script_goes_on(
    prepared: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut_short(problem: Problem, settings: Settings, **more: Any) -> Outcome:
        with suppress(KeyboardInterrupt):  # as the solvers do
            signal.raise_signal(signal.SIGINT)
        return solve(problem, settings, **more)

    shutil.copytree(prepared, tmp_path, dirs_exist_ok=True)
    assert run("solve", "--workers", "2", "-o", "whole").code == 0
    monkeypatch.setattr("pipeplan.cli.solve_and_write.solve", cut_short)
    done = run("solve", "--workers", "2", "-o", "new")
    assert (tmp_path / "new" / "launch.sh").exists()
    assert (done.code, "error: interrupted" in done.err) == (130, True)


def test_more_threads_than_cores_are_noted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeplan.cli.profile.measure._measure", lambda model, given: small_profile())
    for threads in (1, 10_000):
        done = run("profile", "job.py:build", "--threads", str(threads), "--force")
        assert done.code == 0
        assert done.err.splitlines()[:2] == [
            "written: profile.json",
            "next: pipeplan solve --cluster local --workers 3",
        ]
        assert (f"note: {threads} threads share " in done.err) is (threads > 1)


def test_a_profile_of_other_hardware_is_noted_by_every_command_in_the_words_of_the_page(
    run: Run, tmp_path: Path
) -> None:
    for kind, name, cluster, noted in (
        ("cuda", "V100 SXM2 16 GB", "A", False),
        ("cuda", "NVIDIA A100-SXM4-40GB", "A", True),
        ("cuda", "Tesla P100-SXM2-16GB", "A", True),
        ("cpu", "AMD EPYC", "A", True),
        ("cuda", "V100 SXM2 16 GB", "C", True),
        ("cuda", "NVIDIA TITAN X (Pascal)", "C", False),
        ("", "", "A", False),
    ):
        assert bool(device_mismatch(small_profile(kind, name), pipeplan.cluster(cluster))) is noted, (name, cluster)
    quoted = re.search(r"notes `(the profile is for[^`]*)`", " ".join(PAGE.read_text(encoding="utf-8").split()))
    assert quoted is not None
    profile, plan = "mnist-v100", str(tmp_path / "plan")
    for command in (
        ["solve", profile, "--cluster", "C", "--solver", "dp", "-o", plan],
        ["explain", plan, "--samples", "0"],
        ["sweep", profile, "--cluster", "C", "--jobs", "1"],
        ["check", plan],
        ["simulate", plan],
        ["report", plan],
        ["replan", plan, "--lost", "server3", "--no-write", "--solver", "dp"],
    ):
        done = run(*command)
        assert done.code == 0, done.err
        notes = [line for line in done.err.splitlines() if "the profile is for" in line]
        assert [matches(f"note: {quoted[1]}", note) for note in notes] == [True], command
