"""Profiles: the costs of every layer of a model, as data.

This package holds the types, the file format, the bundled profiles, scaling to another minibatch size, and the
comparison of two profiles. `pipeplan.profiler` measures models.
"""
