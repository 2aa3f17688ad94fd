"""Plans anew for what is left of a cluster, and says what changes for a run that goes on from its checkpoint."""
