"""Who may import whom. Read from the source with `ast`; what decides at run time is asked of a fresh interpreter."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from pipeplan.util import graph

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"pipeplan": ROOT / "planner" / "pipeplan", "pipeplan_launch": ROOT / "launch" / "pipeplan_launch"}

# The planner from the bottom up, by the first part of the name after `pipeplan.`: imports go to the same row or up this
# list, never down it.
PLANNER = (
    {"", "_version", "errors", "interrupts", "resources", "schedules", "suggest", "text"},
    {"files", "graph", "units"},
    {
        *("profile_data", "profile_diff", "profile_layers", "rescale", "cluster_data"),
        *("cost", "measured"),
    },
    {"plan"},
    {
        *("alter", "bundled_profiles", "cluster_edit", "cluster_file", "cluster_json", "cluster_write", "devices"),
        *("hardware", "importers", "linkfit", "links", "local", "problem", "stored"),
    },
    {"awaited", "batch", "cuts", "grid", "stages", "contention", "layouts"},
    {"check", "evaluate", "held", "simulation"},
    {"solvers", "baselines", "improve"},
    {"diagnose", "quick", "single", "verdict"},
    {"solving"},
    {"auto", "fewest", "sized"},
    {"rendering", "show"},
    {"emulate", "explain", "exports", "picture", "sweep"},
    {"calibrate", "doctor", "init", "posing", "replan", "report"},
    {"api"},
    {"cli", "__main__"},
)
# Beside that list: it measures, and so it needs torch and the executor's tracer.
PROFILER = "pipeplan.profiler"
PROFILER_MAY_IMPORT = {"_version", "devices", "errors", "profile_data", "profile_layers", "profiler", "units"}

# What the checker of plans may use: readers of files, and nothing that plans or costs.
CHECK_MAY_IMPORT = {"check", "cluster_data", "cluster_json", "errors", "files", "profile_data", "text", "units"}

TORCH_FREE_LAUNCH = (
    "arguments",
    "averaging",
    "beginning",
    "causes",
    "children",
    "config",
    "emulation.network",
    "emulation.stage",
    "errors",
    "fields",
    "interrupt",
    "launchers.host_supervisor",
    "launchers.slurm",
    "launchers.ssh",
    "linkprobe.settings",
    "linkprobe.turns",
    "manifest",
    "manifest_reader",
    "models",
    "preflight",
    "replay",
    "restarts",
    "runfolder",
    "schedule",
    "selftest",
    "whatif",
    "timeline",
    "torch_here",
)


@cache
def modules() -> dict[str, Path]:
    """Every module of both packages, by its dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for path in folder.rglob("*.py"):
            parts = [package, *path.relative_to(folder).with_suffix("").parts]
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported(module: str, *, at_import: bool = False) -> list[str]:
    """What a module imports, in full names; with `at_import` only what runs when the module itself is imported."""
    names: list[str] = []
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    for node in _at_import(tree) if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: imports are absolute in this repository"
            # `from package import name` may name a module or something in the package.
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name if name in modules() else str(node.module) for name in full]
    return list(dict.fromkeys(names))


def _at_import(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run on import: not those inside functions or `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            yield from (inner for other in child.orelse for inner in ast.walk(other))
            continue
        yield child
        yield from _at_import(child)


def brought_in(module: str) -> set[str]:
    """Everything that importing a module imports, through any number of our own modules and their packages."""
    seen: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in modules():
            waiting += imported(name, at_import=True)
            waiting += [name.rpartition(".")[0]] if "." in name else []
    return seen


def package_of(name: str) -> str:
    return name.partition(".")[0]


def part_of(module: str) -> str:
    """`solvers` of `pipeplan.solvers.dp.dynamic_program`, the empty name for the package itself."""
    return [*module.split("."), ""][1]


def of_package(package: str) -> list[str]:
    return sorted(name for name in modules() if package_of(name) == package)


@pytest.mark.parametrize("module", of_package("pipeplan_launch"))
def test_the_executor_never_imports_the_planner(module: str) -> None:
    assert not [name for name in imported(module) if package_of(name) == "pipeplan"]


def test_only_profiling_the_list_of_models_and_the_replay_import_the_executor() -> None:
    users = {
        module
        for module in of_package("pipeplan")
        if any(package_of(name) == "pipeplan_launch" for name in imported(module))
    }
    allowed = {"pipeplan.cli.profile.measure", "pipeplan.cli.profile.links", "pipeplan.cli.models"}
    others = {module for module in users - allowed if not module.startswith(PROFILER)}
    assert {part_of(module) for module in others} == {"emulate", "simulation"}
    theirs = {
        part: {name for module in others if part_of(module) == part for name in imported(module)}
        & {name for name in modules() if package_of(name) == "pipeplan_launch"}
        for part in ("emulate", "simulation")
    }
    assert theirs["simulation"] == {"pipeplan_launch.plan.schedule"}, "what is replayed is what runs, and nothing else"
    started_and_compared = {"pipeplan_launch.emulation.network_namespaces", "pipeplan_launch.telemetry.pace_model"}
    assert theirs["emulate"] == started_and_compared, "all else of a replay runs in processes of its own"


def test_only_profiling_imports_torch() -> None:
    users = {module for module in of_package("pipeplan") if "torch" in map(package_of, imported(module))}
    assert not {module for module in users if not module.startswith(PROFILER)}


# The face of the package hands out the names of its top, when asked for one.
PLANNING = [name for name in of_package("pipeplan") if not name.startswith(PROFILER) and name != "pipeplan"]


def test_the_face_of_the_package_imports_nothing_before_it_is_asked() -> None:
    assert [name for name in imported("pipeplan", at_import=True) if package_of(name) == "pipeplan"] == [
        "pipeplan._version"
    ]
    ours = {name for name in imported("pipeplan") if package_of(name) == "pipeplan"}
    assert ours == {"pipeplan._version", "pipeplan.api"}


@pytest.mark.parametrize("module", PLANNING)
def test_the_arrows_of_the_planner_point_one_way(module: str) -> None:
    row = {name: number for number, names in enumerate(PLANNER) for name in names}
    assert part_of(module) in row, f"{module} has no place in PLANNER: say where it belongs"
    ours = [name for name in imported(module) if package_of(name) == "pipeplan"]
    for name in ours:
        if name.startswith(PROFILER):
            assert module in ("pipeplan.api", "pipeplan.cli.profile.links"), (
                f"{module} imports {name}, which needs torch"
            )
        else:
            assert row[part_of(name)] <= row[part_of(module)], f"{module} imports {name}: an arrow against the order"


@pytest.mark.parametrize("module", [name for name in of_package("pipeplan") if name.startswith(PROFILER)])
def test_the_profiler_uses_only_the_profile(module: str) -> None:
    ours = [name for name in imported(module) if package_of(name) == "pipeplan"]
    assert {part_of(name) for name in ours} <= PROFILER_MAY_IMPORT


@pytest.mark.parametrize("module", [name for name in of_package("pipeplan") if part_of(name) == "solvers"])
def test_solvers_neither_print_nor_write(module: str) -> None:
    names = imported(module)
    assert not {"click", "rich", "jinja2"} & {package_of(name) for name in names}
    ours = {part_of(name) for name in names if package_of(name) == "pipeplan"}
    assert not ours & {"cli", "files", "rendering", "show", "solving"}


def test_the_two_solvers_share_no_search() -> None:
    """Their agreement says nothing where they share code: formulas and the kinds of plan, but no cuts and no tables."""
    by_program = brought_in("pipeplan.solvers.ilp.model") | brought_in("pipeplan.solvers.ilp.memory")
    assert not by_program & {"pipeplan.problem.cuts", "pipeplan.solvers.dp.dynamic_program", "pipeplan.solvers.tables"}
    by_search = brought_in("pipeplan.solvers.dp.dynamic_program")
    assert not {name for name in by_search if name.startswith("pipeplan.solvers.ilp.integer_program")}
    assert "pipeplan.cost.evaluate" not in by_search


@pytest.mark.parametrize("module", [name for name in of_package("pipeplan") if part_of(name) == "check"])
def test_what_checks_a_plan_shares_nothing_with_what_made_it(module: str) -> None:
    ours = [name for name in imported(module) if package_of(name) == "pipeplan"]
    assert {part_of(name) for name in ours} <= CHECK_MAY_IMPORT
    planned = {"baselines", "cost", "cuts", "evaluate", "links", "plan", "problem", "solving", "solvers", "stages"}
    assert not {part_of(name) for name in brought_in(module) if package_of(name) == "pipeplan"} & planned


def test_only_the_command_line_prints() -> None:
    users = {module for module in of_package("pipeplan") if "click" in map(package_of, imported(module))}
    assert {part_of(module) for module in users} == {"cli"}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_goes_round_in_a_circle(package: str) -> None:
    names = of_package(package)
    arrows = [(name, other) for name in names for other in imported(name, at_import=True) if other in names]
    assert graph.find_cycle(names, [(name, other) for name, other in arrows if name != other]) == []


@pytest.mark.parametrize("name", TORCH_FREE_LAUNCH)
def test_what_reads_a_plan_does_without_torch(name: str) -> None:
    assert "torch" not in map(package_of, brought_in(f"pipeplan_launch.{name}"))


def _torch_modules_after(code: str, folder: Path) -> list[str]:
    """The modules of torch that a fresh interpreter holds after running some code."""
    tail = "\nprint(json.dumps([name for name in sys.modules if name.partition('.')[0] == 'torch']))"
    done = subprocess.run(
        [sys.executable, "-c", "import json, sys\n" + code + tail], cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["models"],
        ["clusters"],
        ["profile", "show", "vgg16-v100"],
        ["solve", "mnist-v100", "--cluster", "C", "-o", "made"],
        ["explain", "mnist-v100", "--cluster", "C", "--samples", "0"],
        ["sweep", "mnist-v100", "--cluster", "C", "--servers", "1", "--jobs", "1"],
        ["report", "--help"],
    ],
    ids=lambda a: a[0],
)
def test_planning_never_imports_torch(arguments: list[str], tmp_path: Path) -> None:
    code = f"from pipeplan.cli import cli\ncli.main({arguments!r}, standalone_mode=False)"
    assert _torch_modules_after(code, tmp_path) == []


def test_reading_a_plan_never_imports_torch(tmp_path: Path) -> None:
    code = "\n".join(f"import pipeplan_launch.{name}" for name in TORCH_FREE_LAUNCH)
    assert _torch_modules_after(code, tmp_path) == []
