"""Messages between workers: activations and gradients from stage to stage, all-reduces among replicas.

`p2p` is the transport between stages, by shared memory on one machine and by a process group otherwise. The gradient
modules average gradients over the replicas of a stage, in buckets, compressed or filtered where the user asks for it.
"""
