"""A cluster from measured times of messages and all-reduces.

`levels` groups workers by the rates between them, `fit` fits a latency and a bandwidth, and `build` makes the cluster.
`pipeplan_launch.linkprobe` takes the measurements. Only the latter needs torch.
"""
