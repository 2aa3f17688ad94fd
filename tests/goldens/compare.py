"""Compare with the goldens: `python tests/goldens/compare.py [SECTION …]` prints every difference, and exits with 1.

Floats are compared exactly: the planner's arithmetic is the same from run to run. On another kind of processor, where
numpy may sum in another order, `--tolerance 1e-12` allows for that in the figures; digests then still differ.
"""

from __future__ import annotations

import argparse
import sys
import time

import golden_store
from golden_sections import IN_PARTS, SECTIONS

SHOWN = 10
"""Differences of one section that are printed unless all are asked for."""


def main() -> int:
    """Compare the sections that are named, all by default. Returns 1 where anything differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"some of: {', '.join(SECTIONS)}")
    parser.add_argument("--tolerance", type=float, default=0.0, help="relative, for floats  [default: 0]")
    parser.add_argument("--all", action="store_true", help=f"print every difference, not {SHOWN} of a section")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="make only one plan in N  [default: 1]")
    arguments = parser.parse_args()
    sections = arguments.sections or list(SECTIONS)
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"there is no section {', '.join(sorted(unknown))}; the sections are: {', '.join(SECTIONS)}")
    differs = False
    for section in sections:
        began = time.monotonic()
        frozen, sampled = golden_store.read(section), section in IN_PARTS and arguments.every > 1
        current = SECTIONS[section](every=arguments.every) if sampled else SECTIONS[section]()
        if sampled:
            made = {key.partition("/")[0] for key in current}
            frozen = {key: value for key, value in frozen.items() if key.partition("/")[0] in made}
        found = golden_store.differences(frozen, current, arguments.tolerance)
        verdict = f"{len(found)} DIFFER" if found else "same"
        print(f"{section:8} {len(current):5} entries: {verdict} ({time.monotonic() - began:.1f} s)", flush=True)
        shown = found if arguments.all else found[:SHOWN]
        print("".join(f"{text}\n" for text in shown), end="", flush=True)
        if len(shown) < len(found):
            print(f"… and {len(found) - len(shown)} more: --all prints them")
        differs = differs or bool(found)
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
