"""What shells need: the scripts that complete words, and the names of a plan to complete. No command plans here."""
