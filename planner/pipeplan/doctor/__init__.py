"""What `pipeplan doctor` looks at: this machine, the executor's torch, networks to emulate, and a plan's part here."""
