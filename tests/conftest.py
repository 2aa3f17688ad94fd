"""What several test files need: the reference data, where it is there, and a collection of tests that is quick."""

from __future__ import annotations

import compileall
import gc
import os
import random
import signal
import sys
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


def pytest_configure(config: pytest.Config) -> None:
    """Compile both packages where Python is told to keep nothing that it compiles, as it is in images of containers.

    Every process that a test starts would compile them again, which takes longer than all else at its start.
    """
    if sys.dont_write_bytecode and not hasattr(config, "workerinput"):
        for package in ("planner", "launch"):
            compileall.compile_dir(ROOT / package, quiet=2)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option for another order of tests."""
    parser.addoption("--random-order-seed", type=int, help="run modules, and the tests of each, in a random order")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the trainings of the gallery, each of a minute: at the end one would run while others wait for it."""
    seed = config.getoption("--random-order-seed")
    if seed is not None:
        _shuffle(items, random.Random(seed))
    items.sort(key=lambda item: item.get_closest_marker("gallery") is None)


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
