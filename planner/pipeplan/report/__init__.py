"""The report on a plan and its run: what one page shows, as one JSON document. docs/report.md."""
