"""Measures the executor on this machine: links between workers, its own overhead, and the correctness of its runs.

`links` times messages and all-reduces for `pipeplan profile --links`, `overhead` times the executor with emulated
stages, and `selftest` compares small runs with training in one process. The executor does not import this package.
"""
