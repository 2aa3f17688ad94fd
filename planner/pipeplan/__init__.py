"""pipeplan: provably best pipeline-parallel training plans."""
