"""From times of messages and all-reduces to a cluster: levels, latencies and bandwidths.

`find_levels` groups workers by how fast they reach each other, `alpha_beta` fits a latency and a bandwidth, and
`to_cluster` assembles the cluster. None of this needs torch; `pipeplan_measure.links` measures.
"""
