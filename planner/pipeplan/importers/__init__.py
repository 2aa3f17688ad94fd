"""Readers for files of other projects: PipeDream's profiles, and link measurements of nccl-tests."""
