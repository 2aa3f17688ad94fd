"""Profiles: what every layer of a model costs, as data.

This package holds the types, the file format, the bundled profiles, scaling to another minibatch size, and the
comparison of two profiles. Measuring a model is the task of `pipeplan.profiler`.
"""
