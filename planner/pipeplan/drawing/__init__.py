"""Draws a model's graph in the terminal and as SVG, and the table of a plan.

`pipeplan.report` makes the interactive page of a plan.
"""
