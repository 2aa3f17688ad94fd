"""Draws the terminal of the README as docs/slow-servers.svg: the answer of `doctor --hosts` that a page shows.

    python tests/docs/picture.py [--check]

`--check` fails where the picture differs from the page.
"""

from __future__ import annotations

import argparse
import io
import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "docs" / "slow-servers.svg"
COMMAND = "pipeplan doctor --hosts hosts.txt --profile profile.json"
_BLOCK = re.compile(r"```text\n(\d+ servers, .*?)```", re.DOTALL)
_SVG = """\
<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg" role="img">
<title>pipeplan doctor says why two servers are slower than one</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px;
line-height: {line_height}px; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal"><rect width="{terminal_width}" height="{terminal_height}"/></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""As rich has it, without fonts from elsewhere."""


def answer() -> str:
    """The block of the page that shows the answer."""
    for page in sorted((ROOT / "docs").glob("*.md")):
        if found := _BLOCK.search(page.read_text(encoding="utf-8")):
            return found[1].rstrip()
    raise LookupError("no page shows the answer of doctor --hosts")


def picture() -> str:
    """The terminal as SVG: the command, and its answer, whose first words are bright."""
    lines = answer().splitlines()
    console = Console(record=True, width=max(map(len, lines)) + 1, file=io.StringIO(), color_system="truecolor")
    console.print(Text(f"$ {COMMAND}", style="bold"))
    for line in lines:
        text = Text(line)
        text.highlight_regex(r"^(?:compute|links|clocks|DDP|instead)\b", "cyan")
        text.highlight_regex(r"^WHY .*", "bold yellow")
        console.print(text)
    return console.export_svg(title="two servers", code_format=_SVG, unique_id="terminal")


def main() -> None:
    """Write the picture, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail where the picture is not that of the page")
    given = parser.parse_args()
    drawn = picture()
    if not given.check:
        PICTURE.write_text(drawn, encoding="utf-8")
    elif PICTURE.read_text(encoding="utf-8") != drawn:
        raise SystemExit(f"{PICTURE.relative_to(ROOT)} is not that of the page: run tests/docs/picture.py")


if __name__ == "__main__":
    main()
