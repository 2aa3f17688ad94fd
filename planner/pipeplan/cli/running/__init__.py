"""Commands that bring a finished plan to where it runs: launch scripts, other trainers, emulated servers."""
