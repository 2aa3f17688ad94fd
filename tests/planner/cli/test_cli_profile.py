"""`pipeplan profile --links` and `pipeplan profile show`: the file, the picture, and what is wrong, in one line."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from commandline import Run, check_refusals, refused

from pipeplan.cli.profile import links as links_command
from pipeplan.cluster_data import cluster_toml
from pipeplan.drawing.fold_chains import fold_chains, most_expensive_layers
from pipeplan.drawing.terminal import MAX_DRAWN_LANES, dag_lines, graph_lanes
from pipeplan.profile_data.layers import Layer, Provenance, Size, Tensor
from pipeplan.profile_data.profile import Profile

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
    [(0, "workers 2 and 3 did not come"), (1, "the workers' common store could not be reached")],
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


def profile_of(arrows: str, times: dict[str, float] | None = None) -> Profile:
    """A profile of layers of one letter, from edges such as `ab bc`."""
    names = sorted(set(arrows) - {" "})
    layers = tuple(Layer(name, (times or {}).get(name, 0.001), 0.0, 0, 0) for name in names)
    targets: dict[str, list[str]] = {}
    for source, target in arrows.split():
        targets.setdefault(source, []).append(target)
    tensors = tuple(Tensor(name, name, tuple(found), 8, 8) for name, found in targets.items())
    return Profile(layers, tensors, 4, model_name="letters")


def lines(profile: Profile, width: int = 80) -> list[str]:
    return [text.plain for text in dag_lines(profile, width)]


def read_back(drawn: list[str]) -> list[list[int]]:
    """What every node reads, by following the strokes of the picture upwards."""
    found = []
    columns: dict[int, int] = {}
    for number, line in enumerate(drawn):
        place = left = right = line.index("○")
        while left >= 2 and line[left - 1] == "─":
            left -= 2
        while line[right + 1 : right + 2] == "─":
            right += 2
        joined = {at for at in range(left, right + 1, 2) if line[at] in "├┤╰╯┴┼"}
        joined |= {place} & set(columns)
        found.append(sorted(columns[at] for at in joined))
        columns = {at: source for at, source in columns.items() if line[at : at + 1] in ("│", "├", "┤", "┼")}
        columns[place] = number
    return found


def test_every_edge_is_a_stroke_between_two_nodes() -> None:
    # What reads nothing does not stand below another one.
    for reads, drawn in (
        ([[], [0], [0], [0, 1, 2]], ["○", "├─○", "├─│─○", "○─┴─╯"]),
        # The second lane is read on the way to the third, and again by the last.
        ([[], [], [], [0, 1, 2], [1, 3]], ["○", "│ ○", "│ │ ○", "○─┼─╯", "○─╯"]),
        ([[], []], ["○", "  ○"]),
    ):
        assert graph_lanes(reads, [False] * len(reads)) == drawn
    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(2, 14)
        reads = [sorted(rng.sample(range(node), min(node, rng.choice([0, 1, 1, 1, 2, 3])))) for node in range(count)]
        assert read_back(graph_lanes(reads, [False] * count)) == reads, reads
    drawn = graph_lanes([[] for _ in range(40)] + [list(range(40))], [False] * 40 + [True])
    assert max(map(len, drawn)) <= 2 * MAX_DRAWN_LANES + 1, "very many lanes stay within their room"
    assert drawn[-1].startswith("●─┴")


def test_chains_are_drawn_together_but_for_what_is_expensive() -> None:
    plain = profile_of("ab bc cd de ae ef")
    assert ["".join(layer.name for layer in chain.layers) for chain in fold_chains(plain)] == ["a", "bcd", "ef"]
    assert [chain.reads for chain in fold_chains(plain)] == [(), (0,), (0, 1)]
    hot = profile_of("ab bc cd de ae ef", {"c": 1.0})
    assert most_expensive_layers(hot) == ["c"]
    shown = [re.sub(r"[^a-z…]+", " ", line.replace("layers", "")).split() for line in lines(hot)]
    assert shown == [["a"], ["b"], ["c"], ["d"], ["e", "…", "f"]]
    assert ["●" in line for line in lines(hot)] == [False, False, True, False, False]
    assert lines(hot)[2].rstrip().endswith("█" * 10)
    # What takes as long as the last is marked too; of many that take as long as each other none stands out.
    assert most_expensive_layers(profile_of("ab bc cd", {"a": 4.0, "b": 3.0, "c": 3.0, "d": 0.1})) == ["a", "b", "c"]
    assert most_expensive_layers(profile_of("ab", {"a": 0.0, "b": 0.0})) == []
    assert most_expensive_layers(transformer(9)) == ["head"]


def transformer(blocks: int, *, cross: bool = False) -> Profile:
    """Blocks with two residual connections; with `cross`, each reads what comes first, as a decoder its encoder."""
    layers, reads = [Layer("embed", 0.001, 0.0, 8, 0, op="Embedding")], {}
    last = "embed"
    for number in range(blocks):
        for name, op, inputs in (
            ("ln_1", "LayerNorm", [last]),
            ("attn", "Attention", [f"h.{number}.ln_1", *(["embed"] if cross else [])]),
            ("add_1", "add", [f"h.{number}.attn", last]),
            ("mlp", "Linear", [f"h.{number}.add_1"]),
            ("add_2", "add", [f"h.{number}.mlp", f"h.{number}.add_1"]),
        ):
            layers.append(Layer(f"h.{number}.{name}", 0.001, 0.0, 4, 0, op=op))
            reads[f"h.{number}.{name}"] = inputs
        last = f"h.{number}.add_2"
    layers.append(Layer("head", 0.05, 0.0, 99, 0, op="Linear"))
    reads["head"] = [last]
    readers: dict[str, list[str]] = {}
    for name, inputs in reads.items():
        for source in inputs:
            readers.setdefault(source, []).append(name)
    tensors = tuple(Tensor(name, name, tuple(dict.fromkeys(found)), 8, 8) for name, found in readers.items())
    return Profile(tuple(layers), tensors, 4)


def test_of_many_blocks_that_are_alike_one_is_drawn() -> None:
    for cross in (False, True):
        few, many = lines(transformer(4, cross=cross)), lines(transformer(48, cross=cross))
        assert not any("⋮" in line for line in few)
        assert (len(many) < 20, max(map(len, many)) <= 80) == (True, True)
        (elided,) = [line for line in many if line.startswith("⋮")]
        assert re.search(r"4[67] times more, as far as h\.4[67]\.", elided)
        shares = [float(share) for line in many for share in re.findall(r"([0-9.]+)%", line)]
        assert sum(shares) == pytest.approx(100, abs=1)
        assert ["●" in line for line in many] == [False] * (len(many) - 1) + [True]


def test_the_most_expensive_come_first_and_slow_reading_is_said_to_be_worth_processes(run: Run) -> None:
    profile = profile_of("ab bc cd", {"c": 0.003, "a": 0.002, "b": 0.0, "d": 0.005})
    for read_s, says in ((2e-4, False), (0.004, True), (0.0, False)):
        replace(profile, read_s=read_s).save(Path("p.json"))
        shown = " ".join(run("profile", "show", "p.json", "--no-picture").out.split())
        assert ("Reading the samples of a microbatch" in shown) is bool(read_s)
        assert ("Data(processes=2) reads them in other processes" in shown) is says
    shown = run("profile", "show", "p.json", "--top", "2", "--no-picture").out
    rows = [line.split() for line in shown.splitlines() if re.match(r"(c|d|2 others|sum) ", line)]
    assert [row[0] for row in rows] == ["d", "c", "2", "sum"]
    assert rows[2][1:4] == ["others", "2.000", "0.000"]
    assert (rows[3][-4], "graph" in shown) == ("100.0", False)
    found = json.loads(run("profile", "show", "p.json", "--top", "1", "--json").out)
    assert [(layer["name"], layer["share"]) for layer in found["layers"]] == [("d", 0.5)]
    assert (found["sum"]["forward_s"], found["expensive"]) == (pytest.approx(0.010), ["d"])
    assert found["digest"] == Profile.load(Path("p.json")).digest()
    assert "modelled, not measured, for V100" in run("profile", "show", "vgg16-v100", "--top", "3").out
    for name, said in (("vgg16-v10", "did you mean 'vgg16-v100'"), ("missing.json", ""), (".", "")):
        assert said in refused(run, "profile", "show", name)


def test_what_a_measured_profile_says_beside_its_table_is_shown(run: Run) -> None:
    """The table itself is in docs/profile.md."""
    measured = Provenance(
        *("measured", "cpu", "AMD EPYC", "2026-01-31T12:00:00Z", "monotonic clock", "2.13.0", "0.1.0"),
        *(2, 3, 30, "torch.export", 1, ("the machine was noisy",)),
    )
    plain = profile_of("ab", {"a": 0.003, "b": 0.001})
    layers = tuple(replace(one, buffer_bytes=4096, update_s=0.0005) for one in plain.layers)
    sizes = (Size(16, tuple(replace(one, forward_s=1.5 * one.forward_s) for one in layers), plain.tensors, 0.006),)
    known = {"model_ref": "gpt.py:build", "graph_hash": "sha256:1f6c", "peak_bytes": 3 << 30, "whole_forward_s": 0.005}
    full = replace(plain, layers=layers, provenance=measured, together=(("a", "b"),), sizes=sizes, **known)
    full.save(Path("gpt.json"))
    text = " ".join(run("profile", "show", "gpt.json").out.split())
    for said in (
        "letters, microbatch 4: 2 layers (layer), 4 ms forward and backward",
        "measured on AMD EPYC (cpu), 2 threads, 30 passes after 3",
        "2026-01-31T12:00:00Z",
        "traced by torch.export",
        "torch 2.13.0, pipeplan 0.1.0",
        "model gpt.py:build, graph sha256:1f6c",
        "note: the machine was noisy",
        full.digest(),
        "layers that stay together: a, b",
        "The optimiser's step: 1 ms",
        "Peak memory of a pass and update of the whole model: 3 GiB",
        "Buffers (state that is not a weight): 8 KiB",
        "16: forward 6 ms",
    ):
        assert said in text, said
