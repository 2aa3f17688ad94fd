"""Messages between workers: activations and gradients from stage to stage, all-reduces among replicas.

`p2p` is the transport between stages over Gloo, `ordered_transport` the one over NCCL. The gradient modules average
gradients over the replicas of a stage, in buckets, compressed or filtered where the user asks for it.
"""
