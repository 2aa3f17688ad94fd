"""The data-parallel engine: trains the user's own module, untraced, by torch's DDP or FSDP2.

The engine runs plans of one stage whose stage files set `data_parallel`. Its classes derive from the classes of the
pipeline engine in `runtime`, and share their data, checkpoints, faults, metrics and messages.
"""
