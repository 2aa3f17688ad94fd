"""Measures the executor on this machine: links between workers, its own overhead, and whether its runs are right.

`links` times messages and all-reduces for `pipeplan profile --links`, `overhead` the executor with emulated stages, and
`selftest` compares small runs with one process. The executor does not import this package.
"""
