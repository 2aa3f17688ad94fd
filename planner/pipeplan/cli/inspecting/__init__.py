"""Commands that look at a finished plan, or at a run of it: verify it, simulate it, draw it. None of them plans."""
