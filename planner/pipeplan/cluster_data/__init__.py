"""Clusters: devices, servers, and the links between them, as data.

This package holds the types, the TOML and JSON forms, the bundled and the local cluster, the device files, and the
bandwidths between workers (`links`). Measuring links is the task of `pipeplan_measure.links`; fitting a
cluster to what was measured is that of `pipeplan.link_fit`.
"""
