"""Readers of other projects' files: PipeDream's profiles, and measurements of nccl-tests."""
