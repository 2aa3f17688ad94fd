"""Sound files, all small, and random calls of the command line on damaged ones. The options come from the commands
themselves, so that a new one is drawn as soon as it is there.
"""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import os
import random
import re
import shutil
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import runs
from drive import call
from manifests import write_manifest
from mutations import as_json, as_toml, damaged, damaged_text
from repository import ROOT

from pipeplan.cli import _COMMANDS
from pipeplan.cluster_data.devices import ARITHMETICS, OPERATOR_KINDS, bundled_device_names, load_device
from pipeplan.cluster_data.executor_costs import ExecutorCosts
from pipeplan.cluster_data.machine_costs import IdleCores, MachineCosts
from pipeplan.errors import InputError
from pipeplan.plan.schedules import ACCUMULATING, SCHEDULES
from pipeplan.profile_data.layers import Layer, Tensor
from pipeplan.profile_data.profile import Profile
from pipeplan.profiler.estimate.work import Work, operator_seconds
from pipeplan.util.files import LARGEST
from pipeplan_launch.checkpoint.manifest import Position, SavedTensor, read_manifest
from pipeplan_launch.errors import LaunchError
from pipeplan_launch.plan.stage_files import load_plan


def sound_profile(rng: random.Random) -> dict[str, Any]:
    """A chain or a small DAG."""
    if rng.random() < 0.5:
        layers = (Layer("a", 1.0, 2.0, 100, 10), Layer("b", 0.5, 1.0, 0, 4), Layer("c", 0.25, 0.5, 4 << 20, 6))
        tensors = (Tensor("x", "a", ("b",), 8, 8), Tensor("y", "b", ("c",), 4 << 10, 4))
    else:
        layers = tuple(
            Layer(name, 0.01 * number, 0.02, 1 << 18 + number, 1 << 24, buffer_bytes=64)
            for number, name in enumerate(("in", "left", "right", "join", "out"), start=1)
        )
        tensors = (
            Tensor("x", "in", ("left", "right", "join"), 1 << 16, 1 << 16),
            Tensor("l", "left", ("join",), 1 << 12, 0),
            Tensor("r", "right", ("join",), 1 << 12, 1 << 12),
            Tensor("j", "join", ("out",), 64, 64),
        )
    together = rng.choice([(), (), ((layers[0].name, layers[1].name),)])
    return Profile(layers, tensors, minibatch=8, model_name="small", together=together).to_json()


def sound_cluster(rng: random.Random) -> dict[str, Any]:
    """Equal servers, or servers that differ."""
    device = {"name": "V100", "kind": "cuda", "memory": rng.choice(["16 GiB", 64 << 20]), "speed": 1.0}
    top = {"name": "cluster", "count": 2, "bandwidth": "10 Gbit/s", "latency": "50 us", "allreduce_efficiency": 0.6}
    document: dict[str, Any] = {"format": "pipeplan-cluster", "version": 1, "name": "lab"}
    if rng.random() < 0.6:
        inner = {"name": "server", "count": 2, "bandwidth": "12 GB/s", "source": "measured"}
        return document | {"device": device, "level": [inner, top]}
    servers = [
        {"device": "V100", "devices": 2, "bandwidth": "12 GB/s"},
        {"device": "slow", "devices": 1, "count": 1, "card": "1 Gbit/s", "price_per_hour": 1.5},
    ]
    slow = device | {"name": "slow", "speed": 0.5, "memory": "8 GiB"}
    return document | {"device": [device, slow], "server": servers, "level": [top]}


def sound_graph(rng: random.Random) -> str:
    """A graph.txt as PipeDream's profiler writes it."""
    nodes = [
        f"node{number} -- {what} -- forward_compute_time={rng.randint(1, 90) / 10}, backward_compute_time=2.500, "
        f"activation_size={'[5.0; 6.0]' if number == 3 else '1024.0'}, parameter_size=4096.000"
        for number, what in enumerate(("Input0", "Conv2d(3, 4)", "ReLU(inplace)", "__getitem__(0)", "Linear"), start=1)
    ]
    return "\n".join([*nodes, "\tnode1 -- node2", "\tnode2 -- node3", "\tnode3 -- node4", "\tnode3 -- node5", ""])


def sound_device(rng: random.Random) -> dict[str, Any]:
    """A bundled device."""
    path = ROOT / "profiles" / "devices" / f"{rng.choice(bundled_device_names())}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def sound_costs(rng: random.Random) -> dict[str, Any]:
    """What the executor costs on this machine."""
    throughput = {count: count * rng.uniform(0.4, 1.0) for count in range(1, rng.randint(2, 5))}
    costs = ExecutorCosts(1e-4, 5e-5, 1e-10, 2e-10, source="measured")
    idle = IdleCores(len(throughput), rng.random(), 1e-3) if rng.random() < 0.5 else None
    return MachineCosts(costs, throughput, "2026-01-01T00:00:00Z", alone_pass_s=5e-5, idle=idle).to_json()


def sound_run(plan: Path, rng: random.Random) -> Path:
    """A run of a plan folder, with a summary, a timeline and metrics of every worker."""
    pipeline = json.loads((plan / "stages" / "stage-0.json").read_text(encoding="utf-8"))["pipeline"]
    times = {name: rng.uniform(0.1, 2.0) for name in (*runs.NAMES, *runs.OWN)}
    summary = runs.summary_of(plan, 4.0, [times] * len(pipeline), minibatch=4, emulated=False, cause=None)
    folder = runs.write_run(plan, "20260131T120000Z", summary)
    for name in ("timeline", "metrics"):
        (folder / name).mkdir()
    for stage, entry in enumerate(pipeline):
        for replica, rank in enumerate(entry["workers"]):
            _recorded(folder, summary["plan"], rank, stage, replica, len(entry["workers"]))
    return folder


def _recorded(folder: Path, plan: str, rank: int, stage: int, replica: int, replicas: int) -> None:
    intervals: list[Any] = []
    lines = []
    for number in range(replica, 12, replicas):
        start = float(number + stage)
        intervals += [["forward", number, start, start + 0.5], ["wait", number, start + 0.5, start + 0.75]]
        intervals += [["backward", number, start + 0.75, start + 1.5], ["update", number, start + 1.5, start + 1.75]]
        place = {"rank": rank, "stage": stage, "replica": replica, "epoch": 0, "minibatch": number}
        lines.append(json.dumps(place | {"sync_s": 0.125, "loss": 0.5, "time_s": 1e9 + start}))
    head = {"format": "pipeplan-timeline", "version": 1, "plan": plan, "rank": rank, "stage": stage, "replica": replica}
    head |= {"epoch": 0, "epoch_minibatches": 12, "first": 0, "minibatches": 12, "intervals": intervals}
    (folder / "timeline" / f"rank-{rank}.json").write_text(json.dumps(head))
    (folder / "metrics" / f"rank-{rank}.jsonl").write_text("\n".join([*lines, ""]))


def sound_checkpoint(run: Path, rng: random.Random) -> Path:
    """A complete checkpoint in a run folder, with a manifest that is as it should be."""
    position = Position(rng.randint(0, 3), rng.randint(0, 12), 12)
    folder = run / "checkpoints" / f"epoch-{position.epoch + 1:04d}-sample-{4 * position.minibatch:08d}"
    folder.mkdir(parents=True)
    (folder / "tensors-0.safetensors").write_bytes(bytes(256))
    tensors = {
        f"model.{name}.weight": SavedTensor("float32", (4, 4), "tensors-0.safetensors", 0)
        for index, name in enumerate("ab")
    }
    write_manifest(folder, position, files={"tensors-0.safetensors": 256}, tensors=tensors)
    return folder


PLANNED = (
    [],
    ["--inference", "--stages", "2"],
    ["--schedule", "gpipe", "--batch", "32"],
    ["--schedule", "2bw", "--batch", "64"],
    ["--schedule", "vertical-sync", "--stages", "2"],
)


def plan_folders() -> list[Path]:
    """Plan folders in this folder: several stages with replicas, inference, other schedules."""
    made = []
    profiles = {
        "unequal": (Layer("a", 1.0, 2.0, 100, 10), Layer("b", 1.5, 3.0, 10**10, 4)),
        "copied": tuple(Layer(name, 0.1, 0.2, 10**8, 10) for name in "abcd"),
    }
    for name, layers in profiles.items():
        pairs = itertools.pairwise(layers)
        tensors = tuple(Tensor(one.name, one.name, (two.name,), 10**6, 10**6) for one, two in pairs)
        Profile(layers, tensors, minibatch=4, model_name=name).save(Path(f"{name}.json"))
        for options in PLANNED:
            folder = Path(name + "-".join(options).replace("-", ""))
            arguments = ["solve", f"{name}.json", "--cluster", "A", "--servers", "2", "--ignore-memory"]
            quick = ["--solver", "dp"]
            ended = call([*arguments, *quick, *options, "-o", str(folder)])
            assert ended.code == 0, ended
            made.append(folder)
    return made


INTEGERS = ["1", "2", "2", "3", "4", "0", "-1", "16", "1000000", str(10**24), "x", "", "1.5", "nan"]
FLOATS = ["0", "1", "0.5", "2", "-1", "nan", "inf", "-inf", "1e300", "1e-300", "x", ""]
WORDS = [
    *("a", "b", "c", "join", "a=1", "b=2", "a=0", "a,b", "in,out", "=", ",", "", "x", "é", "\x1b[31m", "a=" + "9" * 30),
    *("a:1", "b:2", "join=2", "plan", "cluster.toml", "profile.json", "2bw", "1:2", "0.5", "2"),
]
LEFT_ALONE = {"time_limit", "help", "cluster_name", "ilp_solver", "workers"}
SELDOM = {"pins", "together", "no_cut_after", "stages", "max_stages", "servers"}


def _command(name: str) -> click.Command:
    command: click.Command = importlib.import_module(f"pipeplan.cli.{_COMMANDS[name][0]}").command
    return command


def commands(parameter: str) -> dict[str, click.Command]:
    """The commands that take a parameter of that name, by name."""
    found = {}
    for name in _COMMANDS:
        # Measuring a model needs torch, and has nothing to do with files.
        if name != "profile":
            command = _command(name)
            if parameter in {one.name for one in command.params}:
                found[name] = command
    return found


def options(command: click.Command, rng: random.Random, share: float, layers: list[str]) -> list[str]:
    """A few random options of a command, most of them with a value that makes sense."""
    drawn: list[str] = []
    for parameter in command.params:
        if not isinstance(parameter, click.Option) or parameter.hidden or parameter.name in LEFT_ALONE:
            continue
        if rng.random() > share or (parameter.name in SELDOM and rng.random() < 0.7):
            continue
        drawn.append(max(parameter.opts, key=len))
        if not parameter.is_flag:
            draw = _sound if rng.random() < 0.85 else _wild
            drawn += [draw(parameter, rng, layers) for _ in range(max(1, parameter.nargs))]
            if drawn[-1] in ACCUMULATING and rng.random() < 0.8:
                drawn += ["--batch", rng.choice(["8", "32", "64"])]
    return drawn


def _sound(parameter: click.Option, rng: random.Random, layers: list[str]) -> str:
    kind, name = parameter.type, parameter.name or ""
    one, other = rng.choice(layers), rng.choice(layers)
    words = {
        "schedule": [*SCHEDULES],
        "stages": ["2", "3", "1-2", "1-4"],
        "staleness": ["0", "1", "2", "any"],
        "pins": [f"{one}=1", f"{layers[-1]}=2"],
        "together": [f"{one},{other}"],
    }
    if name in words:
        return rng.choice(words[name])
    if isinstance(kind, click.types.IntParamType):
        return rng.choice(["40", "100"] if name == "width" else ["1", "2", "2", "3", "4", "8"])
    if isinstance(kind, click.types.FloatParamType):
        return rng.choice(["0", "0.5", "1", "2"])
    if isinstance(kind, click.Choice):
        return rng.choice(list(kind.choices))
    return rng.choice(["plan", "made/plan"]) if isinstance(kind, click.Path) else _wild(parameter, rng, layers)


def _wild(parameter: click.Option, rng: random.Random, layers: list[str]) -> str:
    kind = parameter.type
    if isinstance(kind, click.Path):
        return rng.choice(["plan", "made/plan", "profile.json", "profile.json/plan", "."])
    if isinstance(kind, click.types.IntParamType):
        return rng.choice(INTEGERS)
    return rng.choice(FLOATS if isinstance(kind, click.types.FloatParamType) else WORDS)


def _write(path: Path, document: Any, write: Callable[[Any], str], rng: random.Random, *, harm: bool) -> None:
    """Write a document, damaged if asked: mostly what it says, sometimes its text."""
    if harm and rng.random() < 0.25:
        path.write_bytes(damaged_text(write(document), rng))
        return
    text = write(damaged(document, rng) if harm else document)
    path.write_text(text, encoding="utf-8", errors="surrogatepass")


def solving(rng: random.Random, harm: str) -> list[str]:
    """Arguments of a command that solves a problem, once its files are written: `harm` says what is damaged."""
    profile, cluster = sound_profile(rng), sound_cluster(rng)
    hit = rng.choice(["profile", "cluster"]) if harm == "files" else harm
    _write(Path("profile.json"), profile, as_json, rng, harm=hit == "profile")
    _write(Path("cluster.toml"), cluster, as_toml, rng, harm=hit == "cluster")
    known = commands("cluster_name")
    name = rng.choice(["solve", "solve", *known])
    layers = [layer["name"] for layer in profile["layers"]]
    given = options(known[name], rng, 0.25 if harm == "options" else 0.08, layers)
    if any(one.name == "time_limit" for one in known[name].params):
        given += ["--time-limit", "20"]
    if name == "solve" and "--solver" not in given:
        given += ["--solver", rng.choice(["dp", "both"])]
    where = rng.choice(["cluster.toml"] * 6 + ["A", "C"]) if hit != "cluster" else "cluster.toml"
    files = ["profile.json" if one.name == "profile" else "plan" for one in known[name].params if _is_argument(one)]
    return [name, *files, "--cluster", where, *given]


def _is_argument(parameter: click.Parameter) -> bool:
    return isinstance(parameter, click.Argument)


def importing(rng: random.Random) -> list[str]:
    """Arguments of `import` for a damaged profile of PipeDream."""
    Path("graph.txt").write_bytes(damaged_text(sound_graph(rng), rng))
    return ["import", "graph.txt", "--microbatch", rng.choice(["4", "4", "4", *INTEGERS]), "-o", "made.json"]


def looking(rng: random.Random, planned: list[Path]) -> list[str]:
    """Arguments of `profile show` or `profile diff` for a damaged profile, `planned` or not."""
    _write(Path("profile.json"), sound_profile(rng), as_json, rng, harm=True)
    if rng.random() < 0.5:
        drawn = [option for option in ("--no-picture", "--json") if rng.random() < 0.4]
        top = ["--top", rng.choice(INTEGERS)] if rng.random() < 0.3 else []
        return ["profile", "show", "profile.json", *drawn, *top]
    _write(Path("other.json"), sound_profile(rng), as_json, rng, harm=rng.random() < 0.3)
    files = rng.sample(["profile.json", "other.json"], 2)
    return ["profile", "diff", *files, *(["--json"] if rng.random() < 0.3 else [])]


def replaying(rng: random.Random, folders: list[Path]) -> list[str]:
    """Arguments of a command that reads a plan folder, for a damaged copy of one of `folders`."""
    shutil.copytree(rng.choice(folders), "plan")
    files = sorted(path for path in Path("plan").rglob("*.json"))
    path = rng.choice([Path("plan/plan.json"), Path("plan/plan.json"), *files])
    text = path.read_text(encoding="utf-8")
    if rng.random() < 0.04:
        path.unlink()
    else:
        _write(path, json.loads(text), as_json, rng, harm=True)
    known = commands("plan_folder")
    name = rng.choice(list(known))
    return [name, "plan", *options(known[name], rng, 0.15, ["a"])]


ODD_FILES = [
    *("folder", "pipe", "/dev/zero", "/dev/null", "/dev/full", "loop", "nowhere", "empty", "sparse", "digits", "\x1b")
]


def odd_files(rng: random.Random, folders: list[Path]) -> list[str]:
    """Arguments of any command, in which one or two paths are of what is no ordinary file."""
    Path("folder").mkdir()
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    Path("nowhere").symlink_to("missing/file")
    Path("empty").touch()
    Path("digits").write_text('{"format": "pipeplan-profile", "version": ' + "9" * rng.choice([300, 5000, 10**6]) + "}")
    with Path("sparse").open("wb") as file:
        file.truncate(1 << 36)
    if rng.random() < 0.5:
        arguments = solving(rng, "none")
    else:
        arguments = replaying(rng, folders) if rng.random() < 0.5 else looking(rng, folders)
    places = [place for place, one in enumerate(arguments[1:], 1) if Path(one).exists() or one in ("A", "C", "plan")]
    for place in rng.sample(places, min(len(places), rng.choice([1, 1, 2]))):
        arguments[place] = rng.choice(ODD_FILES)
    return arguments


def executor_reads(rng: random.Random, folders: list[Path]) -> str:
    """What is wrong with how the executor reads a damaged copy of a plan's stage files, empty where nothing is.

    Their checksums fit or are left out, so that the damage gets past them.
    """
    shutil.copytree(rng.choice(folders), "plan")
    path = rng.choice(sorted(Path("plan/stages").glob("*.json")))
    content = json.loads(path.read_text(encoding="utf-8"))
    content["model"]["ref"] = "mnist"
    content.pop("checksum")
    _write(path, content, as_json, rng, harm=True)
    return _one_clear_line(lambda: load_plan(Path("plan")))


def _one_clear_line(read: Callable[[], object]) -> str:
    """What is wrong with how a reader ends, empty where it answers or has one clear line."""
    try:
        read()
    except (LaunchError, InputError) as error:
        return "" if "\n" not in str(error) and len(str(error)) < 1200 else f"not one clear line: {str(error)[:300]!r}"
    except Exception:
        return traceback.format_exc()
    return ""


def estimating(rng: random.Random, folders: list[Path]) -> str:
    """What is wrong with how a damaged device file is read, and with the times that follow from it."""
    _write(Path("card.toml"), sound_device(rng), as_toml, rng, harm=True)
    return _one_clear_line(_estimate)


def _estimate() -> None:
    """Raise an error if the file is refused, or if a time that it gives is one that no profile can hold."""
    device = load_device("card.toml")
    for kind in OPERATOR_KINDS:
        for arithmetic in ARITHMETICS:
            work = Work(kind, arithmetic, 1e12, 1e9, sides=(300, 70))
            seconds = operator_seconds(work, device)
            assert 0 <= seconds <= LARGEST, f"{kind} in {arithmetic}: {seconds} s"


def charging(rng: random.Random, folders: list[Path]) -> list[str]:
    """Arguments of `solve` on this machine, for which the costs of the executor are damaged."""
    path = Path("cache/pipeplan/executor-costs.json")
    path.parent.mkdir(parents=True)
    os.environ |= {"XDG_CACHE_HOME": str(Path("cache").absolute()), "PIPEPLAN_EXECUTOR_COSTS": "on"}
    _write(path, sound_costs(rng), as_json, rng, harm=True)
    Path("profile.json").write_text(as_json(sound_profile(rng)))
    workers = ["--cluster", "local", "--workers", rng.choice("1234")]
    return ["solve", "profile.json", *workers, "--ignore-memory", "--solver", rng.choice(["dp", "both"])]


def measuring(rng: random.Random, folders: list[Path]) -> list[str]:
    """Arguments of a command that reads a run, of which one or two files are damaged."""
    shutil.copytree(rng.choice(folders), "plan")
    run = sound_run(Path("plan"), rng)
    for _ in range(rng.choice([1, 1, 1, 2])):
        path = rng.choice([run / "summary.json", rng.choice(sorted(run.glob("*/*")))])
        if path.suffix == ".jsonl":
            path.write_bytes(damaged_text(path.read_text(encoding="utf-8", errors="replace"), rng))
        else:
            _write(path, _document(path), as_json, rng, harm=True)
    name = rng.choice(["report", "simulate", "simulate", "calibrate", "calibrate"])
    known = options(_command(name), rng, 0.15, ["a"])
    if name == "calibrate":
        return [name, str(run), *known]
    return [name, "plan", *(["--run", str(run)] if name == "simulate" else [str(run)]), *known]


def _document(path: Path) -> Any:
    """The content of a file that may be damaged already."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return {}


def resuming(rng: random.Random, folders: list[Path]) -> list[str]:
    """Arguments of `replan` on a run that has two checkpoints, of which the manifest of one is damaged."""
    shutil.copytree(rng.choice(folders), "plan")
    _damaged_manifest(Path("plan/runs/20260131T120000Z"), rng)
    lost = ["--lost", rng.choice(["server0", "server1", "worker1", "worker0,worker3"])]
    named = ["--run", "plan/runs/20260131T120000Z"] if rng.random() < 0.3 else []
    return ["replan", "plan", *lost, *named, "--solver", "dp", "--time-limit", "5"]


def manifest_read(rng: random.Random, folders: list[Path]) -> str:
    """What is wrong with how the executor reads a damaged manifest, whose checksum fits, mostly."""
    folder = _damaged_manifest(Path("run"), rng)
    return _one_clear_line(lambda: json.dumps(read_manifest(folder).as_json()))


def _damaged_manifest(run: Path, rng: random.Random) -> Path:
    folder = sound_checkpoint(run, rng)
    path = folder / "manifest.json"
    content = damaged(json.loads(path.read_text(encoding="utf-8")), rng)
    if rng.random() < 0.2:
        path.write_bytes(damaged_text(path.read_text(encoding="utf-8"), rng))
    else:
        content |= {"version": 3}
        path.write_bytes(_with_fitting_checksum(as_json(content)))
    return folder


def _with_fitting_checksum(text: str) -> bytes:
    """The text of a document with its checksum set anew, so that what is damaged gets past it."""
    unset = "sha256:" + "0" * 64
    raw = re.sub("sha256:[0-9a-f]{64}", unset, text, count=1).encode("utf-8", "surrogatepass")
    return raw.replace(unset.encode(), b"sha256:" + hashlib.sha256(raw).hexdigest().encode(), 1)
