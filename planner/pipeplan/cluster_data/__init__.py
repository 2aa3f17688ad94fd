"""Clusters: devices, servers, and the links between them, as data.

This package holds the types, the TOML and JSON forms, the bundled and the local cluster, the device files, and the
bandwidths between workers (`links`). `pipeplan_measure.links` measures links, and `pipeplan.link_fit` fits a cluster to
the measurements.
"""
