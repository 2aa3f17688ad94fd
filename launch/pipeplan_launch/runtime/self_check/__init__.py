"""The self-check: the user's own module and the traced, split program train on the same samples, and are compared.

`check.py` runs it, when a model is profiled and when a run starts. It leaves the job as it found it.
"""
