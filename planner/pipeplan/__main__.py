"""`python -m pipeplan`."""

from pipeplan.cli import main

main()
