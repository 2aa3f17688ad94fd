"""The self-check: trains the user's own module and the traced, split program on the same samples, and compares them.

It runs when a model is profiled and when a run starts (`self_check.py`). It leaves the job unchanged.
"""
