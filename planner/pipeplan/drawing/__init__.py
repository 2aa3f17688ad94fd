"""Pictures in the terminal, as SVG and as Graphviz's dot: a model's graph, and the table of a plan.

The interactive page of a plan is made by `pipeplan.report`.
"""
