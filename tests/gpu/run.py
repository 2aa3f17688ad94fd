"""What pipeplan does on one GPU, as a table of expected and measured values.

    PYTHONPATH=planner:launch python3 tests/gpu/run.py [--device cpu] [--minutes 8] [--only NAME,…] [--out FOLDER]

Run it in the repository's root; pipeplan itself need not be installed. On a machine without network, carry the wheels
of pulp, highspy, msgspec and rich in the folder .whl:

    python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
    export PYTHONPATH=/tmp/site PYTHONUNBUFFERED=1; python3 -m compileall -q -j 0 planner launch;
    python3 tests/gpu/run.py --minutes 8 --out "$OUT"

The table goes to standard output and to FOLDER/table.md, and the output of all commands to FOLDER/log. Every check is a
process with a time limit. It prints its rows at once, and a failed one does not stop the others. The most important
checks come first, and none begins after the time is over. `--only model` takes all checks whose names begin so.
`--device cpu` tries the script on small models.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
WORK = "PIPEPLAN_GPU_WORK"
"""Environment variable that names the folder of profiles and plans."""
LEAST_S = 20.0
"""Least time that must be left for a check to begin, in seconds."""
SMALL = "PIPEPLAN_GPU_SMALL"
"""Environment variable that makes the models small, for a trial on a CPU."""
JOBS, GPT = f"{ROOT}/tests/gpu/jobs.py:", f"{ROOT}/docs/gallery/gpt.py:job"
EPOCHS = "2"
"""Epochs of a training run that is timed."""
ROW = "@row "
"""What a line of a check that holds a row of the table begins with."""
EQUAL_MINIBATCHES = 40
LOSS_TOLERANCE, BF16_TOLERANCE = 1e-3, 3e-2
"""Largest relative difference of a loss from that of the plain loop. Kernels of a GPU may add in another order."""
CLOSE = 0.10
"""Relative difference up to which a time or an amount of memory counts as predicted."""
Row = tuple[str, str, str, str]


class CheckFailed(Exception):
    """A command of a check failed; the text is the last lines of its output."""


@dataclass(frozen=True)
class Place:
    """Where a check runs, and where it writes."""

    device: str
    out: Path

    @property
    def work(self) -> Path:
        """The folder of profiles and plans, which are too large to be kept in `out`."""
        return Path(os.environ[WORK])

    def command(self, *arguments: object, limit_s: float = 240, **environment: str) -> str:
        """Run a command in the root, with its output in the log; returns its output. Raises `CheckFailed`."""
        words = [str(one) for one in arguments]
        try:
            done = subprocess.run(
                words, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=limit_s
            )
        except subprocess.TimeoutExpired as error:
            raise CheckFailed(f"{' '.join(words[:5])} took more than {limit_s:.0f} s") from error
        self.log(f"$ {' '.join(words)}\n{done.stdout}{done.stderr}[status {done.returncode}]\n\n")
        if done.returncode:
            raise CheckFailed(last_lines(done.stdout + done.stderr))
        return done.stdout

    def log(self, text: str) -> None:
        """Add a text to the log."""
        with (self.out / "log").open("a", encoding="utf-8") as log:
            log.write(text)

    def pipeplan(self, *arguments: object, limit_s: float = 240) -> str:
        """Run a pipeplan command."""
        return self.command(sys.executable, "-m", "pipeplan", *arguments, limit_s=limit_s)


def last_lines(text: str, count: int = 3) -> str:
    """The last lines of a text that are not empty, in one line."""
    return " / ".join([line.strip() for line in text.splitlines() if line.strip()][-count:])[-500:]


def row(what: str, expected: str, measured: str, verdict: str) -> None:
    """Print a row of the table."""
    print(ROW + json.dumps([what, expected, measured, verdict]), flush=True)


@contextmanager
def part(what: str) -> Iterator[None]:
    """A part of a check, whose error is a row of the table and does not stop the rest of the check."""
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        text = str(error) if isinstance(error, CheckFailed) else f"{type(error).__name__}: {error}"
        row(what, "", text[-500:], "FAILED")


def compared(measured: float, expected: float) -> str:
    """A verdict on a value."""
    share = measured / expected - 1 if expected else float("inf")
    return f"{'ok' if abs(share) <= CLOSE else 'off'} ({share:+.1%})"


def check_hardware(place: Place) -> None:
    """The machine, the versions, and what `pipeplan doctor` says."""
    import torch

    from pipeplan_launch.devices.backend import cuda_text, nccl_version

    versions = f"{cuda_text()}, torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl_version()}"
    python = sys.version.split()[0]
    row("hardware", f"1 {place.device}", f"{versions}, {os.cpu_count()} cores, Python {python}", "")
    with part("pipeplan doctor"):
        lines = place.pipeplan("doctor").splitlines()
        wrong = [" ".join(line.split()) for line in lines if line.startswith(("warning", "missing"))]
        row("pipeplan doctor", "nothing is missing", "; ".join(wrong) or lines[-1], "ok" if not wrong else "see log")


def check_selftest(place: Place) -> None:
    """The executor's self-test with as many workers as there are GPUs."""
    lines = place.pipeplan("doctor", "--selftest").splitlines()
    found = [" ".join(line.split()) for line in lines if " self-test " in line]
    row("pipeplan doctor --selftest", "all passed", found[-1], "ok" if "all " in found[-1] else "FAILED")


def check_equal(place: Place) -> None:
    """One worker that launch.sh starts has the losses of a plain loop, minibatch by minibatch."""
    from jobs import plain_losses

    for number, reference in enumerate(("mnist", GPT, f"{JOBS}mnist_bf16")):
        name = f"{reference.rpartition('/')[2]} on one {place.device} worker equals a plain loop"
        with part(name):
            plan = place.work / f"equal-{number}"
            profile_and_solve(place, reference, plan, "--repeats", "3")
            launch(place, plan, "--epochs", "1", "--max-minibatches", str(EQUAL_MINIBATCHES))
            expected = plain_losses(reference, place.device, EQUAL_MINIBATCHES)
            lines = next((plan / "run" / "metrics").glob("rank-*.jsonl")).read_text(encoding="utf-8").splitlines()
            found = [json.loads(line)["loss"] for line in lines]
            worst = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
            tolerance = BF16_TOLERANCE if reference.endswith("bf16") else LOSS_TOLERANCE
            verdict = "ok" if worst <= tolerance else "FAILED"
            ends = f"loss {found[0]:.4f} to {found[-1]:.4f}"
            row(
                name,
                f"{len(found)} losses within {tolerance:g}",
                f"largest difference {worst:.1e}; {ends}",
                verdict,
            )


def check_shared(place: Place) -> None:
    """Two workers on one GPU, by the host's memory. The self-test launches them, as launch.sh refuses."""
    from pipeplan_measure.selftest import try_case
    from pipeplan_measure.selftest_reference import Case

    stashing, flush = "1f1b-stashing", "1f1b-flush"
    cases = [Case((1, 1), stashing), Case((2,), stashing), Case((1, 1), "2bw"), Case((2, 1), flush)]
    cases.append(Case((1, 1), flush, is_killed=True))
    for number, case in enumerate(cases):
        name = f"workers that share one {place.device}: {case.name}"
        with part(name):
            result = try_case(case, place.device, place.work / f"shared-{number}", 45)
            verdict = "ok" if result.passed else "FAILED"
            row(name, "equal to one process", f"{result.text} ({result.seconds:.0f} s)", verdict)
    row("transport nccl", "equal to gloo", "not run: every worker needs a GPU", "needs two GPUs")


def check_data_parallel(place: Place) -> None:
    """DDP and ZeRO-1 with two workers on one GPU, over Gloo: frozen weights with trained adapters. FSDP is refused."""
    sys.path.append(str(ROOT / "tests/support"))
    from data_parallel_runs import Case, OneProcess, reference
    from feature_workers import trained

    from pipeplan_launch import load_job

    expected = OneProcess(load_job(reference("adapted"), 0), 2, 4).train(2)
    for mode, *options in (("ddp",), ("zero1",), ("fsdp",), ("ddp", "--compress", "bf16")):
        name = f"{' '.join((mode, *options))}, two workers that share one {place.device}"
        with part(name):
            folder = Case("adapted", mode, 2, 4).write(place.work / "-".join((mode, *options)), device=place.device)
            command = [sys.executable, "-m", "pipeplan_launch.supervisor", "--standalone", "--nnodes", "1"]
            command += ["--nproc-per-node", "2", "-m", "pipeplan_launch", folder, "--run-dir", folder / "run"]
            fixed = ["--transport", "gloo", "--epochs", "2", "--timeout", "30", "--restarts", "0", "--probe", "0"]
            try:
                place.command(*command, *fixed, *options, limit_s=60, OMP_NUM_THREADS="1")
            except CheckFailed as error:
                if mode == "fsdp" and "needs a GPU for every worker" in str(error):
                    row(name, "refused in one line", str(error).rpartition(" / ")[2], "ok")
                    continue
                raise
            found = trained(folder / "run")
            worst = max(float((found[key] - one).abs().max() / one.abs().max()) for key, one in expected.items())
            tolerance = BF16_TOLERANCE if options else 1e-5
            verdict = "ok" if worst <= tolerance else "FAILED"
            row(name, f"weights of one process, to {tolerance:g}", f"largest difference {worst:.1e}", verdict)


def profile_and_solve(place: Place, reference: str, plan: Path, *options: object) -> dict[str, Any]:
    """Profile a model here and solve for one worker; returns the profile. A finished plan is not made again."""
    profile = plan.with_suffix(".json")
    if not profile.exists():
        measured = ("--device", place.device, "--halvings", "0", *options)
        place.pipeplan("profile", reference, "-o", profile, "-q", *measured)
    if not plan.exists():
        place.pipeplan("solve", profile, "--cluster", "local", "--workers", "1", "-o", plan, "-q", "--force")
    return json.loads(profile.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def launch(place: Place, plan: Path, *options: str, run: str = "run", **environment: str) -> dict[str, Any]:
    """Train a plan by its launch.sh; returns the run's summary."""
    fixed = ["--probe", "0", "--checkpoint-every", "100", "--evaluate-every", "100"]
    fixed += ["--restarts", "0", "--timeout", "120"]
    environment |= {"PYTHON": sys.executable}
    place.command(plan / "launch.sh", "--run-dir", plan / run, *fixed, *options, **environment)
    return json.loads((plan / run / "summary.json").read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def estimated(place: Place, name: str, wait_s: float = 60) -> dict[str, Any]:
    """The estimate of a model for this GPU, or for the H100 in a trial. `check_estimates` may be at it."""
    import torch

    gpu = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else ""
    device = next((one for one in ("h200", "a100", "v100") if one in gpu), "h100")
    path, begun = place.work / f"{name}-{device}.json", place.work / f"{name}.begun"
    until = time.monotonic() + wait_s
    while begun.exists() and not path.exists() and time.monotonic() < until:
        time.sleep(0.5)
    if not path.exists():
        begun.touch()
        arguments = (JOBS + name, "--device", device, "--halvings", "0", "-q", "-o", path, "--force")
        try:
            place.pipeplan("profile", *arguments)
        finally:
            begun.unlink(missing_ok=True)
    return json.loads(path.read_text(encoding="utf-8"))  # type: ignore[no-any-return]


def check_estimates(place: Place) -> None:
    """Make the estimates of all models on the CPU, beside the first checks."""
    names = [check.name.removeprefix("model-") for check in checks(place.device) if check.name.startswith("model-")]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(partial(estimated, place), names))


def layer_sums(profile: dict[str, Any]) -> tuple[float, float]:
    """(seconds of forward and backward, of a step with the update) by the sum over a profile's layers."""
    passes = sum(layer["forward_s"] + layer["backward_s"] for layer in profile["layers"])
    update = profile["optimizer"].get("step_s", 0.0) + sum(layer["update_s"] for layer in profile["layers"])
    return passes, passes + update


def check_model(place: Place, name: str) -> None:
    """A model's profile, estimate, memory and step time, beside plain PyTorch and a run of its one-worker plan."""
    import torch
    from jobs import plain_step

    passes_s, step_s, peak = plain_step(JOBS + name, place.device)
    torch.cuda.empty_cache()  # this process lives on while others measure
    plan = place.work / name
    with part(f"{name}: profile"):
        began = time.perf_counter()
        profile = profile_and_solve(place, JOBS + name, plan)
        taken, (layers_s, _) = time.perf_counter() - began, layer_sums(profile)
        whole = sum(profile["whole"].values())
        size = f"{len(profile['layers'])} layers, minibatch {profile['minibatch']}"
        text = f"{layers_s * 1e3:.1f} ms summed over {size}; whole {whole * 1e3:.1f} ms; took {taken:.0f} s with solve"
        plain = f"{passes_s * 1e3:.1f} ms forward and backward in plain PyTorch"
        row(f"{name}: profile", plain, text, compared(layers_s, passes_s))
    with part(f"{name}: estimate"):
        passes, whole = layer_sums(estimated(place, name))
        text = f"estimated {whole * 1e3:.1f} ms; forward and backward {passes * 1e3:.1f} of {passes_s * 1e3:.1f} ms"
        row(f"{name}: estimate", f"{step_s * 1e3:.1f} ms a step in plain PyTorch", text, compared(whole, step_s))
    with part(f"{name}: one-worker plan"):
        report_run(name, plan, launch(place, plan, "--epochs", EPOCHS), step_s, peak)


def report_run(name: str, plan: Path, summary: dict[str, Any], step_s: float, peak: int) -> None:
    """Rows on step time and memory of a run."""
    stage, step_time = summary["stages"][0], summary["minibatch_s"]
    parts = [f"{key} {pair(stage[f'{key}_s'], 1e3)}" for key in ("forward", "backward", "update")]
    own = ", ".join(f"{key} {(stage['measured'][f'{key}_s'] or 0) * 1e3:.1f}" for key in ("load", "other"))
    text = f"{step_time['measured'] * 1e3:.1f} ms; {', '.join(parts)}, {own}; plain {step_s * 1e3:.1f} ms"
    verdict = compared(step_time["measured"], step_time["predicted"])
    row(f"{name}: step time of the plan", f"{step_time['predicted'] * 1e3:.1f} ms", text, verdict)
    memory, (allocated, reserved) = stage["memory_bytes"], json.loads((plan / "run" / "peaks.json").read_text())
    stated = json.loads((plan / "stages" / "stage-0.json").read_text(encoding="utf-8"))["prediction"]
    profile = json.loads(plan.with_suffix(".json").read_text(encoding="utf-8"))
    state = stated["parameter_bytes"] * profile["optimizer"]["state_bytes_per_parameter_byte"]
    split = (
        f"weights {mib(stated['parameter_bytes'])}, optimiser {mib(state)}, in flight {mib(stated['minibatch_bytes'])}"
    )
    text = f"{mib(memory['measured'])}; allocated {mib(allocated)}, reserved {mib(reserved)}; plain {mib(peak)}"
    verdict = compared(memory["measured"], memory["predicted"])
    row(f"{name}: peak memory of the plan", f"{mib(memory['predicted'])} ({split})", text, verdict)


def pair(value: dict[str, float | None], scale: float) -> str:
    """A predicted and a measured value."""
    return f"{(value['predicted'] or 0) * scale:.1f} -> {(value['measured'] or 0) * scale:.1f}"


def mib(count: float) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:.0f} MiB"


def plan_and_run(place: Place, name: str) -> tuple[Path, dict[str, Any]]:
    """A model's plan and the summary of its run, which an earlier check may have made."""
    plan = place.work / name
    profile_and_solve(place, JOBS + name, plan)
    summary = plan / "run" / "summary.json"
    found = json.loads(summary.read_text(encoding="utf-8")) if summary.exists() else None
    return plan, found or launch(place, plan, "--epochs", EPOCHS)


def check_compile(place: Place, name: str) -> None:
    """--compile trains, and how much faster than without."""
    plan, eager = plan_and_run(place, name)
    began = time.perf_counter()
    found = launch(place, plan, "--epochs", EPOCHS, "--compile", run="compiled", TORCHINDUCTOR_COMPILE_THREADS="8")
    taken = time.perf_counter() - began
    before, after = (one["minibatch_s"]["measured"] * 1e3 for one in (eager, found))
    losses = [one["epochs"][-1]["loss"] for one in (eager, found)]
    text = f"{after:.1f} ms, loss {losses[1]:.4f}: {before / after:.2f} times as fast; the run took {taken:.0f} s"
    verdict = "ok" if abs(losses[1] - losses[0]) <= 0.02 * abs(losses[0]) else "losses differ"
    row(f"{name}: --compile", f"{before:.1f} ms, loss {losses[0]:.4f} without", text, verdict)


def check_segments(place: Place, name: str) -> None:
    """Peak memory that the allocator reserves with expandable segments, which launch.sh sets, and without."""
    plan, _ = plan_and_run(place, name)
    launch(place, plan, "--epochs", "1", run="fixed", PYTORCH_ALLOC_CONF="expandable_segments:False")
    grown, fixed = (json.loads((plan / run / "peaks.json").read_text()) for run in ("run", "fixed"))
    texts = [f"reserved {mib(reserved)}, allocated {mib(allocated)}" for allocated, reserved in (fixed, grown)]
    verdict = "ok" if grown[1] <= fixed[1] * 1.02 else "reserves more"
    row(f"{name}: expandable segments", f"without: {texts[0]}", f"with: {texts[1]}", verdict)


class Check(NamedTuple):
    """A check of the list, as a function and its time limit."""

    name: str
    run: Callable[[Place], None]
    limit_s: float


def checks(device: str) -> list[Check]:
    """All checks, the most important first."""
    first = "resnet50_fp32" if device == "cuda" else "tiny_fp32"
    models = ["gpt2_bf16", "vgg16_fp32", "gnmt8_fp32", "resnet50_bf16", "gpt2_fp32", "awdlm_fp32"]
    models += ["vgg16_bf16", "gnmt8_bf16", "lstm_fp32", "s2vt_fp32", "alexnet_fp32"]
    models = models if device == "cuda" else ["gpt2_bf16"]

    def model(name: str) -> Check:
        return Check(f"model-{name}", partial(check_model, name=name), 150)

    return [
        Check("hardware", check_hardware, 60),
        Check("equal", check_equal, 120),
        Check("shared", check_shared, 150),
        Check("data-parallel", check_data_parallel, 150),
        model(first),
        model(models[0]),
        Check("compile", partial(check_compile, name="gpt2_bf16"), 200),
        Check("segments", partial(check_segments, name=first), 90),
        *(model(name) for name in models[1:3]),
        Check("selftest", check_selftest, 150 if device == "cuda" else 300),
        *(model(name) for name in models[3:]),
    ]


def run_check(check: Check, options: argparse.Namespace, limit_s: float) -> list[Row]:
    """Run a check in a process of its own, and print its rows as they come; returns them."""
    rows: list[Row] = []
    process, tail, began = start(check.name, options), "", time.monotonic()
    timer = threading.Timer(limit_s, end_group, [process])
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(ROW):
            rows.append(tuple(json.loads(line.removeprefix(ROW))))
            write_row(rows[-1], options.out)
        else:
            tail = (tail + line)[-2000:]
    status = process.wait()
    timer.cancel()
    if status:
        ended = f"stopped after {limit_s:.0f} s; " if time.monotonic() - began >= limit_s else ""
        rows.append((check.name, "", ended + last_lines(tail), "FAILED"))
        write_row(rows[-1], options.out)
    Place(options.device, options.out).log(f"[{check.name}: {time.monotonic() - began:.0f} s]\n{tail}\n")
    return rows


def start(name: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """Start a check in a process group of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--device", options.device, "--out", str(options.out)]
    return subprocess.Popen(
        [*command, "--inside", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def end_group(process: subprocess.Popen[str]) -> None:
    """End a check and what it started. A launcher of workers gets some seconds to stop these."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
        time.sleep(1)
        os.killpg(process.pid, signal.SIGKILL)


def write_row(cells: Row, out: Path) -> None:
    """Print a row of the table, and add it to table.md."""
    line = "| " + " | ".join(re.sub(r"\s+", " ", cell).replace("|", "\\|") for cell in cells) + " |"
    print(line, flush=True)
    with (out / "table.md").open("a", encoding="utf-8") as table:
        table.write(line + "\n")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0, help="no check begins or goes on after so many (8)")
    parser.add_argument("--only", default="", metavar="NAME,…", help="checks, or beginnings of their names")
    parser.add_argument("--out", type=Path, default=Path("gpu-checks"), help="folder of table.md and log (gpu-checks)")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.out = options.out.absolute()
    return options


def main(arguments: list[str] | None = None) -> int:
    """Run the checks; the status is 1 if one failed."""
    options, began = parse(arguments), time.monotonic()
    if options.device == "cpu":
        os.environ[SMALL] = "1"
    folders = os.pathsep.join([str(ROOT / "planner"), str(ROOT / "launch")])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folders, os.environ.get("PYTHONPATH", "")]))
    options.out.mkdir(parents=True, exist_ok=True)
    every = checks(options.device)
    if options.inside:
        chosen = {check.name: check.run for check in every} | {"estimates": check_estimates}
        chosen[options.inside](Place(options.device, options.out))
        return 0
    with tempfile.TemporaryDirectory(prefix="pipeplan-gpu-", ignore_cleanup_errors=True) as work:
        os.environ[WORK] = work
        wanted = tuple(filter(None, options.only.split(",")))
        selected = [check for check in every if not wanted or check.name.startswith(wanted)]
        (options.out / "table.md").unlink(missing_ok=True)
        for cells in (("check", "expected", "measured", "verdict"), ("---",) * 4):
            write_row(cells, options.out)
        beside = start("estimates", options) if any(one.name.startswith("model") for one in selected) else None
        rows: list[Row] = []
        for check in selected:
            left = options.minutes * 60 - (time.monotonic() - began)
            if left < LEAST_S:
                write_row((check.name, "", "", "not run, for lack of time"), options.out)
                continue
            rows += run_check(check, options, min(check.limit_s, left))
        if beside is not None:
            end_group(beside)
    failed = sum(cells[3] == "FAILED" for cells in rows)
    print(f"\n{len(rows)} rows in {time.monotonic() - began:.0f} s, {failed} failed", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
