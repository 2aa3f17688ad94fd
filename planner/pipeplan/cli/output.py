"""Everything that the command line prints: answers on standard output, notes and progress on standard error.

Only errors are printed elsewhere: in `pipeplan.cli`, which also decides the exit code.
"""

from __future__ import annotations

import io
import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, TextIO

import click
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from pipeplan.util.text import escaped_json, one_line, printable

if TYPE_CHECKING:
    from pipeplan.cluster_data.cluster import Cluster
    from pipeplan.profile_data.profile import Profile

PIPED_WIDTH = 80
"""Width in columns of explanations, sweeps and drawings that go into a file or a pipe."""
LINE_EVERY_S = 10.0
"""Seconds between two lines of progress outside of terminals."""
_UNLIMITED = 10_000
_asked_for: list[TextIO] = []
"""The stream for output that is printed even while `silenced`; empty while everything is printed."""


class SafeConsole(Console):
    """A console that replaces control characters and bidirectional overrides in all output."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The segments of a renderable, with printable text."""
        for segment in super().render(renderable, options):
            text = segment.text if segment.control else printable(segment.text)
            yield segment if text == segment.text else Segment(text, segment.style, segment.control)


def answer_width() -> int:
    """Width of a drawing in columns: the terminal's width, or at most `PIPED_WIDTH` elsewhere."""
    console = _console()
    return console.width if console.is_terminal else min(console.width, PIPED_WIDTH)


def print_answer(
    parts: Iterable[RenderableType], *, fold: bool = False, narrow: bool = False, wide: bool = False
) -> None:
    """Print lines and tables on standard output, each beginning on a new line.

    Tables are fitted to the console. Lines keep their length, or are wrapped to the console with `fold`. Outside of
    terminals, `narrow` limits the console to `PIPED_WIDTH` columns, and `wide` gives tables all the width that they
    need.
    """
    if _asked_for:
        return
    from rich.measure import Measurement
    from rich.table import Table

    console = _console()
    if narrow and not console.is_terminal:
        console = _console(width=PIPED_WIDTH)
    for part in parts:
        if not isinstance(part, Table):
            console.print(part, soft_wrap=not fold)
            continue
        if wide and not console.is_terminal:
            unlimited = console.options.update(width=_UNLIMITED)
            console.width = max(console.width, Measurement.get(console, unlimited, part).maximum)
        console.print(part)


def print_line(text: str, *, newline: bool = True) -> None:
    """Print plain text on standard output."""
    click.echo(printable(text), nl=newline)


def print_warning(profile: Profile, cluster: Cluster | None = None, *, as_json: bool = False) -> None:
    """Print warnings if the profile leaves work out, or was made for none of the cluster's devices.

    Warnings come before the answer. If the answer is a JSON document, the warnings go to standard error.
    """
    if profile.provenance.warning:
        (note if as_json else print_line)(one_line(profile.provenance.warning))
    from pipeplan.cluster_data.devices import device_mismatch  # slow to import, and few commands need it

    if cluster is not None and (mismatch := device_mismatch(profile, cluster)):
        note(mismatch)


def print_json(document: object, *, indent: int | None = 1, ascii_only: bool = False) -> None:
    """Print a JSON document on standard output, even while `silenced`, because the user asked for it with `--json`."""
    text = json.dumps(document, indent=indent, allow_nan=False, ensure_ascii=ascii_only)
    print_file(escaped_json(text) + "\n")


def print_file(text: str) -> None:
    """Print a text that the user asked for in place of a file, even while `silenced`."""
    stream = _asked_for[-1] if _asked_for else sys.stdout
    click.echo(printable(text) if stream.isatty() else text, nl=False, file=stream)


def note(text: str, *, dim: bool = False) -> None:
    """Print a line on standard error, such as the name of a written file."""
    _console(stderr=True).print(text, style="dim" if dim else None, soft_wrap=True)


def is_watched() -> bool:
    """Whether standard error is a terminal, so that progress can be drawn there."""
    return _console(stderr=True).is_terminal


@contextmanager
def status(text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner with a text on standard error, in terminals only. Yields the function that replaces the text."""
    from rich.markup import escape

    console = _console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(escape(text)) as spinner:
        yield lambda changed: spinner.update(escape(changed))


@contextmanager
def live_line(text: Callable[[], str]) -> Iterator[None]:
    """Show a line on standard error while the block runs: drawn anew in terminals, elsewhere printed now and then.

    `text` is called for every drawing, in a separate thread.
    """
    console = _console(stderr=True)
    if console.is_terminal:
        from rich.live import Live
        from rich.text import Text

        line = Live(console=console, get_renderable=lambda: Text(text(), style="dim"), transient=True)
        with line:
            yield
        return
    ended = threading.Event()

    def print_lines(stream: TextIO) -> None:
        while not ended.wait(LINE_EVERY_S):
            click.echo(printable(text()), file=stream)

    printer = threading.Thread(target=print_lines, args=(sys.stderr,), daemon=True)
    printer.start()
    try:
        yield
    finally:
        ended.set()
        printer.join()


@contextmanager
def progress_bar(text: str) -> Iterator[Callable[[int, int, str], None]]:
    """Show a progress bar on standard error, in terminals only.

    Yields the function that updates the bar. The function's arguments are the steps done, the total of steps (0 if
    unknown), and the text beside the bar.
    """
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    # Bind the stream now, because the block may redirect sys.stderr.
    console = SafeConsole(file=sys.stderr)
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=None)
        yield lambda done, total, step: bar.update(task, completed=done, total=total or None, description=step)


@contextmanager
def silenced() -> Iterator[None]:
    """Drop all output of the block, except that of `print_json` and `print_file`."""
    _asked_for.append(sys.stdout)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            yield
    finally:
        _asked_for.pop()


def _console(*, stderr: bool = False, width: int | None = None) -> Console:
    return SafeConsole(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)
