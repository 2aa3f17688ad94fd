"""From times of messages and all-reduces to a cluster: which workers are near each other, and what joins them.

`levels` clusters, `fit` finds a latency and a bandwidth, `build` puts the cluster together. None of this needs torch;
`pipeplan_launch.linkprobe` measures.
"""
