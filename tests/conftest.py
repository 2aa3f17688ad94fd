"""What several test files need: the reference data, where it is there, and a collection of tests that is quick."""

from __future__ import annotations

import compileall
import gc
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from repository import ROOT

# Whatever a shell starts in the background does not hear Ctrl-C, nor does what it starts: tests send it themselves.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What a user measured on this machine makes no difference to tests, and no test measures it by the way.
os.environ["PIPEPLAN_EXECUTOR_COSTS"] = "off"

_BESIDE = ROOT.parent / "shared"
_LONGER = ROOT / "tests" / "longer.txt"
"""A line for each module with tests that take longer than `_QUICK_S`: its name and theirs, or its name alone where a
third of them do.
"""
_LONG = {line.split()[0]: line.split()[1:] for line in _LONGER.read_text(encoding="utf-8").splitlines()}
_QUICK_S = 0.1
"""CPU seconds of a case, with all processes that it starts."""


def pytest_configure(config: pytest.Config) -> None:
    """Compile both packages where Python is told to keep nothing that it compiles, as it is in images of containers.

    Every process that a test starts would compile them again, which takes longer than all else at its start.
    """
    if sys.dont_write_bytecode and not hasattr(config, "workerinput"):
        for package in ("planner", "launch"):
            compileall.compile_dir(ROOT / package, quiet=2)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options for another order of tests, and for the list of those that are not quick."""
    parser.addoption("--random-order-seed", type=int, help="run modules, and the tests of each, in a random order")
    parser.addoption("--write-longer", action="store_true", help=f"with -n 0: write {_LONGER.name} anew")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module of which no test is quick, if only quick tests are asked for."""
    return True if config.option.markexpr == "quick" and _LONG.get(collection_path.name) == [] else None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark quick tests, and begin with the trainings of the gallery, each of a minute: at the end one would run while
    others wait for it."""
    for item in items:
        marked = any(item.get_closest_marker(kind) for kind in ("slow", "browser", "deploy", "site", "gallery"))
        module, function = _name(item)
        long = module in _LONG and (not _LONG[module] or function in _LONG[module])
        if not marked and not long:
            item.add_marker("quick")
    seed = config.getoption("--random-order-seed")
    if seed is not None:
        _shuffle(items, random.Random(seed))
    items.sort(key=lambda item: item.get_closest_marker("gallery") is None)


_taken_s: dict[tuple[str, str], float] = {}
"""The most CPU seconds of a case, by module and test function."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count the CPU seconds of a test."""
    before = _cpu_s()
    result = yield
    _taken_s[_name(item)] = max(_taken_s.get(_name(item), 0.0), _cpu_s() - before)
    return result


def _name(item: pytest.Item) -> tuple[str, str]:
    """The name of the file, without its folder, and of the function."""
    return item.path.name, item.nodeid.partition("::")[2].partition("[")[0]


def _cpu_s() -> float:
    """CPU seconds of this process and of all that it has started, also by way of the host of `worker_host.py`."""
    host = sys.modules.get("worker_host")
    return sum(os.times()[:4]) + (host.host_cpu_s() if host else 0.0)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write the list of tests that are not quick, if asked for."""
    if session.config.getoption("--write-longer"):
        counts = Counter(module for module, _ in _taken_s)
        lines = []
        for module, count in sorted(counts.items()):
            long = sorted(name for (one, name), seconds in _taken_s.items() if one == module and seconds > _QUICK_S)
            lines += [" ".join([module, *(long if 3 * len(long) < count else ())])] if long else []
        _LONGER.write_text("\n".join([*lines, ""]), encoding="utf-8")


def _shuffle(items: list[pytest.Item], drawn: random.Random) -> None:
    """Shuffle modules and the tests of each. A module stays together, as its fixtures are made once."""
    modules: dict[Path, list[pytest.Item]] = {}
    for item in items:
        modules.setdefault(item.path, []).append(item)
    shuffled = list(modules.values())
    drawn.shuffle(shuffled)
    for tests in shuffled:
        drawn.shuffle(tests)
    items[:] = [item for tests in shuffled for item in tests]


_HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE, signal.SIGXFSZ)


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    """Fail a test after which signals are handled otherwise than before, and restore them for the next one."""
    before = {number: signal.getsignal(number) for number in _HANDLED}
    yield
    changed = [number.name for number in _HANDLED if signal.getsignal(number) is not before[number]]
    for number in _HANDLED:
        signal.signal(number, before[number])
    assert not changed, f"the test left other handlers of {changed} behind"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without searching what they import for garbage, then or later: it stays to the end.

    The modules of torch and of the tests are a million objects, and searching them takes as long as importing them.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session")
def reference() -> Path:
    """The folder of published figures, named by PIPEPLAN_REFERENCE; tests that compare with them skip without it."""
    folder = Path(os.environ.get("PIPEPLAN_REFERENCE", _BESIDE))
    if not (folder / "pipedream" / "vgg16.txt").is_file():
        pytest.skip(
            f"no published profiles in {folder / 'pipedream'}: set PIPEPLAN_REFERENCE to a folder that has them"
        )
    return folder
