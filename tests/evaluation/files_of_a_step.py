"""Which files of the executor one training step on a worker runs functions of.

    PYTHONPATH=tests/support python tests/evaluation/files_of_a_step.py

Two workers train a pipeline of two stages. A step is all that the first one does from one forward pass to the next,
when the pipeline is full. The last column counts the moves into the file from another one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from functools import partial
from pathlib import Path
from types import FrameType

from toy_workers import Toy, stage_contents, toy_worker, write_plan

from pipeplan_launch.elastic.local_workers import fork_worker, worker_variables
from pipeplan_launch.elastic.store import serve_store
from pipeplan_launch.plan.schedule import Action, ActionKind
from pipeplan_launch.runtime.engine import Engine

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
FIRST, LAST = Action(ActionKind.FORWARD, 8), Action(ActionKind.FORWARD, 9)
"""The step is what happens from the end of one to the end of the other."""


def note_step(found: Path) -> None:
    """Have the engine write down which files the step enters."""
    entered: list[str] = []
    perform = Engine.perform

    def note(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(LAUNCH)):
            entered.append(name.removeprefix(f"{LAUNCH}/"))

    def noted(engine: Engine, action: Action) -> None:
        perform(engine, action)
        if action == LAST and not found.exists():  # the evaluation has these actions too
            sys.setprofile(None)
            found.write_text(json.dumps(entered))
        if action == FIRST and not found.exists():
            sys.setprofile(note)

    Engine.perform = noted  # type: ignore[method-assign]


def work(rank: int, plan: Path) -> None:
    """Run a worker."""
    if rank == 0:
        note_step(plan / "entered.json")
    raise SystemExit(toy_worker(rank, [str(plan), "--epochs", "1", "--log-every", "0"], Toy(samples=40)))


def main() -> None:
    """Print every file with its number of calls and of moves into it."""
    with tempfile.TemporaryDirectory() as folder:
        plan = write_plan(Path(folder), stage_contents([1, 1]))
        store = serve_store()
        workers = [fork_worker(partial(work, rank, plan), worker_variables(rank, 2, store.port)) for rank in range(2)]
        if any(os.waitpid(pid, 0)[1] for pid in workers):
            raise SystemExit("a worker failed")
        entered = json.loads((plan / "entered.json").read_text())
    moves = Counter(after for before, after in zip(["", *entered], entered, strict=False) if before != after)
    for name, calls in Counter(entered).most_common():
        print(f"{calls:5} {moves[name]:5}  {name}")
    print(f"{len(moves)} files, {len(entered)} calls, {sum(moves.values())} moves between files")


if __name__ == "__main__":
    main()
