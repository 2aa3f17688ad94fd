"""Who may import whom. Read from the source with `ast`; what decides at run time is asked of a fresh interpreter."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

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
    {"planning"},
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
MEASURE = ({"pair_schedule", "selftest_reference", "small_plans"}, {"servers"}, {"links", "overhead", "selftest"})
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

DP = "pipeplan.solvers.dp."
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
"""The modules of `DP`, and the folder beside them, from the bottom up."""

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


def of_part(part: str) -> list[str]:
    return [name for name in modules() if part_of(name) == part]


def test_imports_between_parts_point_one_way() -> None:
    """Among parts of a package and of the dynamic program; the executor never imports the planner."""
    parts = {name: part_of(name) for name in modules() if name not in PACKAGES}
    assert set(parts.values()) == set(ROW), "each part has a place in the order"
    assert imports_upward(parts, ROW) == []
    inside = {name: name.removeprefix(DP).split(".")[0] for name in modules() if name.startswith(DP)}
    row = {part: number for number, parts in enumerate(DYNAMIC_PROGRAM) for part in parts}
    assert set(inside.values()) == set(row)
    assert imports_upward(inside, row) == []
    for package, refused in (
        ("pipeplan_launch", {"pipeplan", "pipeplan_measure"}),
        ("pipeplan_measure", {"pipeplan"}),
    ):
        for name in of_package(package):
            assert not refused & set(map(package_of, imported(name))), name


def imports_upward(parts: Mapping[str, str], row: Mapping[str, int]) -> list[str]:
    """The imports between two parts of a package that do not point to a lower row. `parts`: of every module."""
    found = []
    for name, part in parts.items():
        others = [other for other in imported(name) if parts.get(other, part) != part]
        near = [other for other in others if package_of(other) == package_of(name)]
        found += [f"{name} imports {other}" for other in near if row[parts[other]] >= row[part]]
    return found


def test_no_import_goes_round_in_a_circle() -> None:
    # The packages themselves look their names up on first access.
    names = [name for name in modules() if name not in PACKAGES]
    arrows = [(name, other) for name in names for other in imported(name) if other in names and other != name]
    assert graph.find_cycle(names, arrows) == []


def test_every_folder_says_what_is_in_it() -> None:
    for path in modules().values():
        if path.name == "__init__.py":
            tree = ast.parse(path.read_text(encoding="utf-8"))
            assert ast.get_docstring(tree), f"{path} does not describe its folder"
            assert len(list(path.parent.glob("*.py"))) <= MOST_FILES, f"{path.parent} holds more than one kind of thing"


def test_a_class_name_occurs_once_in_a_package() -> None:
    for package in PACKAGES:
        nodes = [(name, node) for name in of_package(package) for node in source_tree(name).body]
        places = [(node.name, name) for name, node in nodes if isinstance(node, ast.ClassDef)]
        counts = Counter(name for name, _ in places)
        assert [place for place in places if counts[place[0]] > 1] == []


def test_only_some_parts_of_the_planner_use_the_executor() -> None:
    used: dict[str, set[str]] = {}
    for module in of_package("pipeplan"):
        theirs = {name for name in imported(module) if package_of(name).startswith("pipeplan_")}
        if theirs and not module.startswith(PROFILER):
            used.setdefault(part_of(module), set()).update(theirs)
    assert used.pop("pipeplan.cli")
    recorded, order = "pipeplan_launch.job_reference", "pipeplan_launch.plan.virtual_stages"
    assert used == {
        "pipeplan.profile_data": {recorded},  # one rule says where the file of a job is
        "pipeplan.checker": {order, recorded},  # it checks the order that runs
        "pipeplan.cost": {order},  # memory follows from the order that runs
        "pipeplan.util": {"pipeplan_launch.typed_document"},  # both read files by their types
        # A run's files are read by the types by which the executor writes them.
        "pipeplan.run_data": {
            "pipeplan_launch.checkpoint.manifest",
            "pipeplan_launch.errors",
            "pipeplan_launch.telemetry.run_folder",
        },
        "pipeplan.rendering": {"pipeplan_launch.files", recorded},  # the executor checks what is written for it
        "pipeplan.simulation": {"pipeplan_launch.plan.schedule"},  # what is simulated is what runs
    }


def test_only_the_profiler_imports_torch_and_few_modules_import_the_profiler() -> None:
    others = [module for module in of_package("pipeplan") if not module.startswith(PROFILER)]
    assert not [module for module in others if "torch" in map(package_of, imported(module))]
    users = {module for module in others if any(name.startswith(PROFILER) for name in imported(module))}
    assert users <= {"pipeplan.api", "pipeplan.cli.profile.measure", "pipeplan.cli.profile.links"}


def test_importing_the_package_imports_nothing_but_the_version() -> None:
    first = {name for name in imported("pipeplan", at_import=True) if package_of(name) == "pipeplan"}
    assert first <= {"pipeplan._version"}
    assert {name for name in imported("pipeplan") if package_of(name) == "pipeplan"} == {*first, "pipeplan.api"}


def test_only_the_command_line_prints_and_solvers_write_no_files() -> None:
    users = {module for module in of_package("pipeplan") if "click" in map(package_of, imported(module))}
    assert parts_of(users) == {"cli"}
    for module in of_part("pipeplan.solvers"):
        assert not {"click", "rich", "jinja2"} & {package_of(name) for name in imported(module)}, module
        assert "pipeplan.util.files" not in imported(module), module


def test_the_two_solvers_share_no_search() -> None:
    """Their agreement says nothing where they share code: formulas and the kinds of plan, but no cuts and no tables."""
    by_program = brought_in("pipeplan.solvers.ilp.integer_program")
    assert not {name for name in by_program if name.startswith("pipeplan.solvers.dp.")}
    assert "pipeplan.problem.cuts" not in by_program
    by_search = brought_in("pipeplan.solvers.dp.dynamic_program")
    assert not {name for name in by_search if name.startswith("pipeplan.solvers.ilp")}
    assert "pipeplan.cost.evaluate" not in by_search


def test_the_checker_shares_nothing_with_what_made_the_plan() -> None:
    for module in of_part("pipeplan.checker"):
        assert parts_of(imported(module)) <= CHECKER_MAY_IMPORT, module
        assert not parts_of(brought_in(module)) & {"cost", "plan", "planning", "problem", "solvers"}, module
        assert "pipeplan.cluster_data.links" not in brought_in(module), module


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


# Each is run in turn, and none imports torch.
PLANNING = (
    ["--help"],
    ["list"],
    ["profile", "show", "vgg16-v100"],
    ["solve", "mnist-v100", "--cluster", "C", "-o", "made"],
    ["explain", "mnist-v100", "--cluster", "C", "--samples", "0"],
    ["sweep", "mnist-v100", "--cluster", "C", "--servers", "1", "--jobs", "1"],
    ["report", "--help"],
)


def test_neither_planning_nor_reading_a_plan_imports_torch(tmp_path: Path) -> None:
    """By the imports that are written down, and in a fresh interpreter."""
    for name in TORCH_FREE_LAUNCH:
        assert "torch" not in map(package_of, brought_in(f"pipeplan_launch.{name}")), name
    steps = [f"import pipeplan_launch.{name}" for name in TORCH_FREE_LAUNCH] + ["import pipeplan_measure.pair_schedule"]
    steps += [f"from pipeplan.cli import cli; cli.main({words!r}, standalone_mode=False)" for words in PLANNING]
    code = f"import sys\nfor step in {steps!r}:\n    exec(step)\n    assert 'torch' not in sys.modules, step"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
