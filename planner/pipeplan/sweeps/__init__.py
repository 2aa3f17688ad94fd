"""Plans for one model on many clusters: every combination of servers, links, memory, minibatch and schedule."""
