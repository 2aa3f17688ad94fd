"""Lays out and draws the graph of a model, and prints the answer of `pipeplan solve` and the table of a plan.

`pipeplan.report` makes the interactive page of a plan.
"""
