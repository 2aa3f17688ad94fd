"""What a run of a plan measured, read from its run folder."""
