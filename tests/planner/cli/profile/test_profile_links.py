"""`pipeplan profile --links`, as a user calls it: the file that it writes, and what is wrong, in one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import Run, check_refusals, refused

from pipeplan.cli.profile import links as links_command
from pipeplan.cluster_data import cluster_toml

JOINED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is one of several."""
    for name in JOINED:
        monkeypatch.delenv(name, raising=False)


def test_a_file_that_solve_takes(run: Run, tmp_path: Path) -> None:
    code, _, err = run("profile", "--links", "--workers", "2", "--device", "cpu", "-o", "here.toml", "--budget", "0.5")
    assert code == 0, err
    *meanwhile, written, last = err.splitlines()
    assert meanwhile == ["measuring pairs of workers", "measuring level 1"]
    assert (written, last) == ("written: here.toml", "next: pipeplan solve --cluster here.toml")
    cluster = cluster_toml.load_cluster("here.toml")
    assert (cluster.name, cluster.workers, cluster.servers, cluster.device.kind) == ("here", 2, 1, "cpu")
    assert cluster.levels[0].source.startswith("measured 20")
    assert cluster.device.memory_bytes * 2 <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    code, _, err = run("solve", "vgg16-v100", "--cluster", "here.toml", "--ignore-memory", "--solver", "dp")
    assert code == 0, err
    line = refused(run, "profile", "--links", "--workers", "2", "-o", "here.toml")
    assert line == "here.toml exists: give another file with -o, or --force to replace it"


def test_what_is_wrong_is_said_before_anything_is_measured(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links_command.local, "local_gpus", list)
    (tmp_path / "file").touch()
    options = {
        "--workers 1": "there is no link with 1 worker: give --workers 2 or more",
        "--workers 0": "there is no link with 0 workers: give --workers 2 or more",
        "--budget 0": "--budget takes a number of seconds above 0, not 0",
        "--timeout nan": "--timeout takes a number of seconds above 0, not nan",
        "-o .": ". is a folder: name the file to write with -o",
        "-o file/cluster.toml": "cannot write file/cluster.toml: ",
        "--device tpu": "--device: there is no 'tpu'; did you mean 'cpu'?",
        "--device cuda": "--device cuda: nvidia-smi finds no GPU here",
        "MODEL": "pipeplan profile: got unexpected extra argument (MODEL)",
        "--servers 2 --workers 1": "run this on each with NODE_RANK=0 to 1, and MASTER_ADDR and MASTER_PORT of",
    }
    check_refusals(run, {f"profile --links {line}": said for line, said in options.items()})
    for variables, said in (
        ({"NODE_RANK": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "NODE_RANK is '2': it must be this server's"),
        ({"NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT is 'x': it must be a port number"),
        (
            {"MASTER_PORT": "1", "RANK": "0", "WORLD_SIZE": "2"},
            "workers are started by pipeplan: run it once on each server",
        ),
    ):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        assert said in refused(run, "profile", "--links", "--servers", "2", "--workers", "1", "--device", "cpu")


# What follows is of processes of their own: seconds each, for importing torch.


def server(number: int, folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pipeplan", "profile", "--links", "--servers", "2", "--workers", "2", *options]
    place = {"NODE_RANK": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20001 + os.getpid() % 20000)}
    return subprocess.Popen(
        [*command, "-o", "made.toml"], cwd=folder, env=os.environ | place, text=True, stderr=subprocess.PIPE
    )


@pytest.mark.slow
def test_servers_that_start_their_own_workers(tmp_path: Path) -> None:
    both = [server(number, tmp_path, "--budget", "3") for number in range(2)]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[1] == "", "the first server shows progress"
    assert cluster_toml.load_cluster(str(tmp_path / "made.toml")).workers == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "line"),
    [
        (0, "workers 2 and 3 did not come"),
        (1, "the workers' common store could not be reached"),
    ],
    ids=["second", "first"],
)
def test_a_server_that_never_comes(tmp_path: Path, number: int, line: str) -> None:
    """Its ranks are named by the one that is there."""
    process = server(number, tmp_path, "--timeout", "3")
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 2
    assert said.startswith(f"error: {line}")
    assert said.count("\n") == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_file_that_is_there_ends_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "made.toml").write_text("mine")
    both = [server(number, tmp_path, "--timeout", "600") for number in range(2)]
    said = [process.communicate(timeout=120)[1] for process in both]  # raises where a worker waits for the timeout
    assert said == ["error: made.toml exists: give another file with -o, or --force to replace it\n", ""]
    assert [process.returncode for process in both] == [2, 2]
    assert (tmp_path / "made.toml").read_text() == "mine"


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["one", "all"])
def test_an_interrupt_leaves_no_processes(tmp_path: Path, whom: str) -> None:
    command = [sys.executable, "-m", "pipeplan", "profile", "--links", "--workers", "3", "-o", "made.toml"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    assert process.stderr.readline() == "measuring pairs of workers\n"
    if whom == "all":
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.sub(r"(?m)^measuring.*\n", "", said).strip() == "error: interrupted"
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    assert not list(tmp_path.iterdir())
