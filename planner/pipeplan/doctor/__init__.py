"""The checks of `pipeplan doctor`: this machine, the executor's torch, network emulation, and a plan's part here."""
