"""Which files of both packages a command runs functions of, and how long the imports of its start take.

    python tests/evaluation/files_of_a_solve.py [COMMAND …]
    python tests/evaluation/files_of_a_solve.py imports [COMMAND …]

The default command is `solve vgg16-v100 --cluster A --no-write`. Code that runs on import does not count.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import CodeType, FrameType

from pipeplan.cli import cli

ROOT = Path(__file__).resolve().parents[2]
SOLVE = ["solve", "vgg16-v100", "--cluster", "A", "--no-write"]
MOST_IMPORTS = 25


def files_run(arguments: list[str]) -> Counter[str]:
    """The files whose functions a command runs in this thread, relative to the repository, with their counts."""
    run: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        run.add(frame.f_code)

    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        sys.setprofile(note)
        try:
            cli.main(arguments, standalone_mode=False)
        finally:
            sys.setprofile(None)
    functions = [Path(code.co_filename) for code in run if code.co_flags & inspect.CO_OPTIMIZED]
    packages = (ROOT / "planner", ROOT / "launch")
    return Counter(
        path.relative_to(ROOT).as_posix() for path in functions if any(one in path.parents for one in packages)
    )


def import_times(arguments: list[str]) -> list[tuple[float, str]]:
    """Milliseconds that each module's own import takes in a fresh process, the slowest first."""
    command = [sys.executable, "-X", "importtime", "-m", "pipeplan", *arguments]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stderr.splitlines()
    rows = [line.removeprefix("import time:").split("|") for line in lines if line.startswith("import time:")]
    return sorted(((int(own) / 1000, name.strip()) for own, _, name in rows[1:]), reverse=True)


def main() -> None:
    """Print the files and how many there are in each folder, or the slowest imports."""
    arguments = sys.argv[1:]
    if arguments[:1] == ["imports"]:
        times = import_times(arguments[1:] or [*SOLVE[:1], "--help"])
        for milliseconds, name in times[:MOST_IMPORTS]:
            print(f"{milliseconds:7.1f} ms  {name}")
        print(f"{sum(own for own, _ in times):7.1f} ms  {len(times)} modules")
        return
    found = files_run(arguments or SOLVE)
    for name, functions in sorted(found.items()):
        print(f"{functions:5}  {name}")
    for folder, files in Counter(Path(name).parent.as_posix() for name in found).most_common():
        print(f"{files:5} files  {folder}")
    print(f"{len(found):5} files, {sum(found.values())} functions")


if __name__ == "__main__":
    main()
