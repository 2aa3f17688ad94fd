"""Who may import whom. Read from the source with `ast`; what decides at run time is asked of a fresh interpreter."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest

from pipeplan.util import graph

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "pipeplan": ROOT / "planner" / "pipeplan",
    "pipeplan_launch": ROOT / "launch" / "pipeplan_launch",
    "pipeplan_measure": ROOT / "launch" / "pipeplan_measure",
}

# The parts of each package from the bottom up: a part imports only itself and parts of rows before its own. A part is a
# folder of the package, or a module beside the folders.
PLANNER = (
    {"_version", "errors"},
    {"util"},
    {"plan", "profile_data", "run_data"},
    {"cluster_data"},
    {"checker", "problem", "profiler"},
    {"cost"},
    {"calibration", "link_fit", "simulation", "solvers"},
    {"importers", "planning"},
    {"first_steps", "rendering"},
    {"drawing", "exports"},
    {"from_options"},
    {"explanation", "sweeps"},
    {"replanning", "report"},
    {"questions"},
    {"api"},
    {"cli"},
    {"__main__"},
)
EXECUTOR = (
    {"child_processes", "errors", "torch_check"},
    {"files", "job_reference", "typed_document"},
    {"devices"},
    {"job", "plan", "rank_mapping"},
    {"comm", "command_line", "models", "telemetry", "tracing"},
    {"checkpoint", "elastic"},
    {"capabilities", "export", "launchers", "preflight", "runtime", "worker_monitor"},
    {"data_parallel"},
    {"supervisor", "worker"},
    {"__main__"},
)
MEASURE = ({"pair_schedule", "selftest_reference", "small_plans"}, {"links", "overhead", "selftest"})
ROW = {
    f"{package}.{part}": number
    for package, rows in (("pipeplan", PLANNER), ("pipeplan_launch", EXECUTOR), ("pipeplan_measure", MEASURE))
    for number, row in enumerate(rows)
    for part in row
}

PROFILER = "pipeplan.profiler"
"""The only part of the planner that needs torch: it measures models with the executor's tracer."""

CHECKER_MAY_IMPORT = {"checker", "cluster_data", "errors", "profile_data", "util"}
"""The checker of plans may use readers of files, and nothing that plans or costs."""

DYNAMIC_PROGRAM = (
    {"budget"},
    {"search", "threshold"},
    {"cut_selection", "find_pipeline"},
    {"pipeline_searches"},
    {"results"},
    {"grids", "spaces"},
    {"charged"},
    {"certificate", "dynamic_program"},
)
"""The modules of `pipeplan.solvers.dp`, and the folder beside them, from the bottom up."""

MOST_FILES = 26
"""Files in one folder: beyond that, it holds more than one kind of thing."""

TORCH_FREE_LAUNCH = (
    "child_processes",
    "command_line",
    "elastic.handshake",
    "elastic.local_workers",
    "elastic.restart_state",
    "elastic.signals",
    "elastic.store_gateway",
    "errors",
    "job.bundled_models",
    "job_reference",
    "launchers.host_supervisor",
    "launchers.slurm",
    "launchers.ssh",
    "capabilities",
    "checkpoint.manifest",
    "plan.run_options",
    "plan.launch_plan",
    "plan.communication_order",
    "plan.schedule",
    "plan.schedule_check",
    "preflight",
    "telemetry.difference",
    "telemetry.run_folder",
    "telemetry.recorder",
    "torch_check",
    "typed_document",
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


@cache
def source_tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@cache
def imported(module: str, *, at_import: bool = False) -> tuple[str, ...]:
    """What a module imports, in full names; with `at_import` only what runs when the module itself is imported."""
    names: list[str] = []
    for node in _at_import(source_tree(module)) if at_import else ast.walk(source_tree(module)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: imports are absolute in this repository"
            # `from package import name` may name a module or something in the package.
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names += [name if name in modules() else str(node.module) for name in full]
    return tuple(dict.fromkeys(names))


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
    """`pipeplan.solvers` of `pipeplan.solvers.dp.search.states`, and `pipeplan` of the package itself."""
    return ".".join(module.split(".")[:2])


def parts_of(names: Iterable[str], package: str = "pipeplan") -> set[str]:
    """The parts of the modules in `names` that belong to a package, without the package's name."""
    return {part_of(name).partition(".")[2] for name in names if package_of(name) == package}


def of_package(package: str) -> list[str]:
    return sorted(name for name in modules() if package_of(name) == package)


@pytest.mark.parametrize("module", of_package("pipeplan_launch"))
def test_the_executor_imports_neither_the_planner_nor_what_measures_it(module: str) -> None:
    assert not [name for name in imported(module) if package_of(name) in ("pipeplan", "pipeplan_measure")]


@pytest.mark.parametrize("module", of_package("pipeplan_measure"))
def test_what_measures_the_executor_never_imports_the_planner(module: str) -> None:
    assert not [name for name in imported(module) if package_of(name) == "pipeplan"]


TOP_LEVEL = ("pipeplan", "pipeplan_launch", "pipeplan_measure")
"""The packages themselves, whose names are looked up on first access in the parts at the top."""


@pytest.mark.parametrize("package", PACKAGES)
def test_the_arrows_between_parts_point_one_way(package: str) -> None:
    upward = []
    for module in of_package(package):
        if module in TOP_LEVEL:
            continue
        assert part_of(module) in ROW, f"{module} is in no part that has a place in the order"
        theirs = [name for name in imported(module) if package_of(name) == package and name not in TOP_LEVEL]
        others = [name for name in theirs if part_of(name) != part_of(module)]
        upward += [f"{module} imports {name}" for name in others if ROW[part_of(name)] >= ROW[part_of(module)]]
    assert upward == []


def test_the_arrows_between_parts_of_the_dynamic_program_point_one_way() -> None:
    folder = "pipeplan.solvers.dp."
    row = {part: number for number, parts in enumerate(DYNAMIC_PROGRAM) for part in parts}
    inside = {name: name.removeprefix(folder).split(".")[0] for name in modules() if name.startswith(folder)}
    assert set(inside.values()) == set(row)
    arrows = [(name, other) for name in inside for other in imported(name) if other in inside]
    others = [(name, other) for name, other in arrows if inside[name] != inside[other]]
    assert [f"{name} imports {other}" for name, other in others if row[inside[other]] >= row[inside[name]]] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_import_goes_round_in_a_circle(package: str) -> None:
    names = [name for name in of_package(package) if name not in TOP_LEVEL]
    arrows = [(name, other) for name in names for other in imported(name) if other in names and other != name]
    assert graph.find_cycle(names, arrows) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_every_part_exists_and_says_what_is_in_it(package: str) -> None:
    parts = {part_of(name) for name in of_package(package)} - set(TOP_LEVEL)
    assert {part for part in ROW if package_of(part) == package} == parts
    folders = [path for path in modules().values() if path.name == "__init__.py" and PACKAGES[package] in path.parents]
    for path in folders:
        assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), f"{path} does not describe its folder"
        assert len(list(path.parent.glob("*.py"))) <= MOST_FILES, f"{path.parent} holds more than one kind of thing"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_class_name_occurs_once_in_a_package(package: str) -> None:
    classes: dict[str, list[str]] = {}
    for module in of_package(package):
        for node in source_tree(module).body:
            if isinstance(node, ast.ClassDef):
                classes.setdefault(node.name, []).append(module)
    assert {name: places for name, places in classes.items() if len(places) > 1} == {}


def test_only_some_parts_of_the_planner_use_the_executor() -> None:
    used: dict[str, set[str]] = {}
    for module in of_package("pipeplan"):
        theirs = {name for name in imported(module) if package_of(name).startswith("pipeplan_")}
        if theirs and not module.startswith(PROFILER):
            used.setdefault(part_of(module), set()).update(theirs)
    files = {"pipeplan.profile_data", "pipeplan.rendering", "pipeplan.run_data", "pipeplan.util"}
    assert set(used) == {"pipeplan.cli", "pipeplan.cost", "pipeplan.checker", "pipeplan.simulation", *files}
    recorded = {"pipeplan_launch.job_reference"}
    assert used["pipeplan.profile_data"] == recorded, "one rule says where the file of a job is"
    assert used["pipeplan.checker"] == {"pipeplan_launch.plan.virtual_stages", *recorded}, (
        "it checks the order that runs"
    )
    assert used["pipeplan.cost"] == {"pipeplan_launch.plan.virtual_stages"}, "memory follows from the order that runs"
    assert used["pipeplan.util"] == {"pipeplan_launch.typed_document"}, "both read files by their types"
    assert used["pipeplan.run_data"] == {
        "pipeplan_launch.checkpoint.manifest",
        "pipeplan_launch.errors",
        "pipeplan_launch.telemetry.run_folder",
    }, "a run's files are read by the types by which the executor writes them"
    assert used["pipeplan.rendering"] == {"pipeplan_launch.files", *recorded}, (
        "the executor checks what is written for it"
    )
    simulated = {"pipeplan_launch.plan.schedule", "pipeplan_launch.plan.communication_order"}
    assert used["pipeplan.simulation"] == simulated, "what is simulated is what runs"


def test_only_the_profiler_imports_torch() -> None:
    users = {module for module in of_package("pipeplan") if "torch" in map(package_of, imported(module))}
    assert not {module for module in users if not module.startswith(PROFILER)}


def test_only_two_modules_import_the_profiler() -> None:
    users = {
        module
        for module in of_package("pipeplan")
        if not module.startswith(PROFILER) and any(name.startswith(PROFILER) for name in imported(module))
    }
    measuring = {"pipeplan.cli.profile.measure", "pipeplan.cli.profile.links"}
    assert users <= {"pipeplan.api", *measuring}


def test_importing_the_package_imports_nothing_but_the_version() -> None:
    first = {name for name in imported("pipeplan", at_import=True) if package_of(name) == "pipeplan"}
    assert first <= {"pipeplan._version"}
    assert {name for name in imported("pipeplan") if package_of(name) == "pipeplan"} == {*first, "pipeplan.api"}


@pytest.mark.parametrize("module", [name for name in of_package("pipeplan") if part_of(name) == "pipeplan.solvers"])
def test_solvers_neither_print_nor_write(module: str) -> None:
    assert not {"click", "rich", "jinja2"} & {package_of(name) for name in imported(module)}
    assert "pipeplan.util.files" not in imported(module)


def test_the_two_solvers_share_no_search() -> None:
    """Their agreement says nothing where they share code: formulas and the kinds of plan, but no cuts and no tables."""
    by_program = brought_in("pipeplan.solvers.ilp.integer_program")
    assert not {name for name in by_program if name.startswith("pipeplan.solvers.dp.")}
    assert "pipeplan.problem.cuts" not in by_program
    by_search = brought_in("pipeplan.solvers.dp.dynamic_program")
    assert not {name for name in by_search if name.startswith("pipeplan.solvers.ilp")}
    assert "pipeplan.cost.evaluate" not in by_search


@pytest.mark.parametrize("module", [name for name in of_package("pipeplan") if part_of(name) == "pipeplan.checker"])
def test_the_checker_shares_nothing_with_what_made_the_plan(module: str) -> None:
    assert parts_of(imported(module)) <= CHECKER_MAY_IMPORT
    assert not parts_of(brought_in(module)) & {"cost", "plan", "planning", "problem", "solvers"}
    assert "pipeplan.cluster_data.links" not in brought_in(module)


def test_only_the_command_line_prints() -> None:
    users = {module for module in of_package("pipeplan") if "click" in map(package_of, imported(module))}
    assert parts_of(users) == {"cli"}


@pytest.mark.parametrize("name", TORCH_FREE_LAUNCH)
def test_what_reads_a_plan_does_without_torch(name: str) -> None:
    assert "torch" not in map(package_of, brought_in(f"pipeplan_launch.{name}"))


def test_only_one_part_of_the_executor_knows_kinds_of_devices() -> None:
    """`devices` answers for each kind; what asks torch which versions it has (`capabilities`) computes nothing."""
    asking = []
    for module in of_package("pipeplan_launch"):
        if part_of(module) not in ("pipeplan_launch.devices", "pipeplan_launch.capabilities"):
            names = [ast.unparse(node) for node in ast.walk(source_tree(module)) if isinstance(node, ast.Attribute)]
            asking += [
                f"{module}: {name}" for name in names if name.startswith("torch.cuda") or name.endswith(".is_cuda")
            ]
            asking += [f"{module}: device.type {text}" for text in _compared_types(module)]
    assert asking == []


def _compared_types(module: str) -> list[str]:
    """The comparisons of a device's type with the name of one that only some machines have."""
    compared = [node for node in ast.walk(source_tree(module)) if isinstance(node, ast.Compare)]
    return [ast.unparse(node) for node in compared if ".type" in ast.unparse(node.left) and "cuda" in ast.unparse(node)]


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
        ["list"],
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
    code += "\nimport pipeplan_measure.pair_schedule"
    assert _torch_modules_after(code, tmp_path) == []
