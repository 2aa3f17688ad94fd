"""Freeze the goldens: `python tests/goldens/freeze.py [SECTION …]` writes what the code answers now to `data/`."""

from __future__ import annotations

import argparse

import golden_store


def main() -> None:
    """Write the sections that are named, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"some of: {', '.join(golden_store.SECTIONS)}")
    for section in golden_store.chosen(parser.parse_args().sections):
        texts = golden_store.SECTIONS[section]()
        golden_store.write(section, texts)
        print(f"{section:8} {len(texts):5} texts", flush=True)


if __name__ == "__main__":
    main()
