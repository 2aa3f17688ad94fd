"""The data-parallel engine: trains the user's own module, untraced, by torch's DDP or FSDP2.

It runs plans of one stage whose stage files name it (`data_parallel`). Its classes derive from those of the pipeline
engine in `runtime`, and share its data, checkpoints, faults, metrics and messages.
"""
