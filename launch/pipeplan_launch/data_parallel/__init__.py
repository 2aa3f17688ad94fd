"""The data-parallel engine: trains the user's own module, untraced, by torch's DDP or FSDP2.

It runs plans of one stage whose stage files name it (`data_parallel`). Data, checkpoints, faults, metrics and messages
are those of the pipeline's engine, whose classes it derives from. Traced stages and pipelines are in `runtime`.
"""
