"""Plans again for the rest of a cluster, and says what changes for a run that resumes from its checkpoint."""
