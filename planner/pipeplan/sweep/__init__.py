"""Solves one model for many clusters: every combination of servers, links, memory, minibatch sizes and schedules."""
