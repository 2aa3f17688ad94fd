"""Published results beside predictions: which configuration, how fast, and why not where the two differ."""
