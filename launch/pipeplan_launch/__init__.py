"""pipeplan_launch: the executor that runs a pipeplan plan."""
