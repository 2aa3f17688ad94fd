"""Completion in shells: the scripts that complete words, and the names of a plan to complete. Nothing plans here."""
