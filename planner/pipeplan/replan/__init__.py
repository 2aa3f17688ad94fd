"""Plans anew for the rest of a cluster after a loss, and describes how a run resumes from its checkpoint."""
