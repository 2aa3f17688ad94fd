"""Write the table on docs/evidence/table1.md anew.

    PYTHONPATH=tests/benchmarks python -m table1.update_page FOLDER

FOLDER holds PipeDream's published profiles, `pipedream/vgg16.txt` and so on.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from click.testing import CliRunner
from reproduce_table1 import command

PAGE = Path(__file__).resolve().parents[3] / "docs" / "evidence" / "table1.md"
BLOCK = re.compile(r"<!-- table1 -->\n(.*?)<!-- /table1 -->", re.DOTALL)


def printed_table(reference: Path) -> str:
    """The table as Markdown, with its titles one level down."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table1.md"
        result = CliRunner().invoke(command, ["--reference", str(reference), "-o", str(file)])
        assert result.exit_code == 0, result.output
        return re.sub(r"^## ", "### ", file.read_text(encoding="utf-8"), flags=re.MULTILINE)


def main() -> None:
    """Replace the table on the page."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    text = PAGE.read_text(encoding="utf-8")
    block = f"<!-- table1 -->\n\n{printed_table(Path(sys.argv[1])).strip()}\n\n<!-- /table1 -->"
    PAGE.write_text(BLOCK.sub(lambda _: block, text), encoding="utf-8")


if __name__ == "__main__":
    main()
