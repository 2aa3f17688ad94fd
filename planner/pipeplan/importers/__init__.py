"""Readers of other projects' profile formats."""
