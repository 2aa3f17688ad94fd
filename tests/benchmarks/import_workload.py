"""Convert a published workload of dnn-partitioning or Piper to a pipeplan profile.

    python tests/benchmarks/import_workload.py FILE --minibatch 8 --time-unit ms [--bandwidth '12 GB/s'] -o profile.json

The files are those of github.com/msr-fiddle/dnn-partitioning and github.com/msr-fiddle/piper. They do not state their
minibatch size and their unit of time: published times are milliseconds, and seconds in Piper's bert32a100.json. Edges
without a size need the bandwidth of the link between accelerator and host.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from foreign_formats.assumptions import UNITS, Assumptions
from foreign_formats.dnn_partitioning import read_dnn_partitioning
from foreign_formats.piper import read_piper

from pipeplan.errors import InputError
from pipeplan.util.files import read_json
from pipeplan.util.units import parse_rate


def main() -> None:
    """Read the file in its format and write the profile."""
    parser = argparse.ArgumentParser(description="Convert a published workload to a pipeplan profile.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--minibatch", type=int, required=True, help="samples in a minibatch")
    parser.add_argument("--time-unit", choices=UNITS, required=True)
    parser.add_argument("--bandwidth", help="bandwidth between accelerator and host")
    parser.add_argument("-o", "--output", type=Path, default=Path("profile.json"))
    options = parser.parse_args()
    try:
        bandwidth = parse_rate(options.bandwidth, "--bandwidth") if options.bandwidth else None
        assumptions = Assumptions(options.minibatch, options.time_unit, bandwidth)
        nodes = read_json(options.file, "workload")["nodes"].items()
        read = read_piper if nodes and nodes[0].get("TMPCs") is not None else read_dnn_partitioning
        profile = read(options.file, assumptions)
        profile.save(options.output)
    except InputError as error:
        sys.exit(str(error))
    print(f"{options.output}: {len(profile.layers)} layers, {profile.total_s:.4g} s forward and backward")
    for note in profile.provenance.notes:
        print(f"  {note}")


if __name__ == "__main__":
    main()
