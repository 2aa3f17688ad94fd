"""Readers for the published workloads of dnn-partitioning and Piper, which other planners are compared on."""
