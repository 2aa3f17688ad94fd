"""Freeze the goldens: `python tests/goldens/freeze.py [SECTION …]` writes what the code answers now to `data/`."""

from __future__ import annotations

import argparse
import time

import golden_store
from golden_sections import SECTIONS


def main() -> None:
    """Write the sections that are named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"some of: {', '.join(SECTIONS)}")
    sections = parser.parse_args().sections or list(SECTIONS)
    if unknown := set(sections) - set(SECTIONS):
        parser.error(f"there is no section {', '.join(sorted(unknown))}; the sections are: {', '.join(SECTIONS)}")
    for section in sections:
        began = time.monotonic()
        entries = SECTIONS[section]()
        golden_store.write(section, entries)
        size = golden_store.size_of(section) / 1000
        print(f"{section:8} {len(entries):5} entries {size:7.0f} kB {time.monotonic() - began:6.1f} s", flush=True)


if __name__ == "__main__":
    main()
