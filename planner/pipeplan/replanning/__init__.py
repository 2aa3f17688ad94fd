"""Plans again for what is left of a cluster, and says what changes for a run that resumes from its checkpoint."""
