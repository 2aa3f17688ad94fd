"""pipeplan: provably best pipeline-parallel training plans."""

__version__ = "0.1.0"
