"""Compare with the goldens: `python tests/goldens/compare.py [SECTION …]` prints every difference, and exits with 1."""

from __future__ import annotations

import argparse
import sys

import golden_store


def main() -> int:
    """Compare the sections that are named, all by default. Returns 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"some of: {', '.join(golden_store.SECTIONS)}")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="make only one plan in N  [default: 1]")
    arguments = parser.parse_args()
    differs = False
    for section in golden_store.chosen(arguments.sections):
        frozen, make = golden_store.read(section), golden_store.SECTIONS[section]
        current = make(arguments.every) if section == "files" else make()
        if section == "files":  # only the plans that were made
            made = {key.partition("/")[0] for key in current}
            frozen = {key: text for key, text in frozen.items() if key.partition("/")[0] in made}
        found = golden_store.differences(frozen, current)
        print(f"{section:8} {len(current):5} texts: {f'{len(found)} DIFFER' if found else 'same'}", *found, sep="\n")
        differs = differs or bool(found)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
