"""Help with the options of a planning command in groups, such as "What I train" and "Where"."""

from __future__ import annotations

import click

GROUPS = {
    "What I train": ("--batch", "--microbatch", "--staleness", "--schedule", "--inference"),
    "Where": ("--cluster", "--servers", "--workers", "--max-workers"),
    "Constraints": (
        "--stages",
        "--max-replicas",
        "--grid",
        "--pin",
        "--together",
        "--shard-optimizer",
        "--no-recompute",
        "--ignore-memory",
    ),
    "Search": ("--time-limit", "--solver"),
    "Output": ("--output", "--force", "--no-write", "--json", "--quiet", "--for", "--help"),
}
"""The options under each heading, in the order of the help."""


class GroupedCommand(click.Command):
    """A command whose help lists its options under the headings of `GROUPS`, and further ones under "Options"."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options to the help."""
        options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
        records = {option.opts[-1]: option.get_help_record(ctx) for option in options}
        grouped = {name for names in GROUPS.values() for name in names}
        groups = {"Options": [name for name in records if name not in grouped]} | GROUPS
        for heading, names in groups.items():
            rows = [record for name in names if (record := records.get(name)) is not None]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)
