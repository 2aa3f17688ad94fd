"""Messages between workers: activations and gradients from stage to stage, all-reduces among replicas.

`p2p` is the transport between stages over Gloo, and `ordered_transport` is the transport over NCCL. The gradient
modules average gradients over the replicas of a stage, in buckets. Options compress or filter them.
"""
