"""Derives a cluster from times of messages and all-reduces: levels, latencies and bandwidths.

`find_levels` groups workers by the rates between them, `alpha_beta` fits a latency and a bandwidth, and `to_cluster`
assembles the cluster. This package does not need torch; `pipeplan_measure.links` makes the measurements.
"""
