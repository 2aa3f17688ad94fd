"""Checkpoints that any plan of the same model can resume from.

A checkpoint holds tensors by the names of the unsplit model, a manifest, and the optimiser's state by parameter.
"""
