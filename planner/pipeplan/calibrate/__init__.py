"""From what runs measured to a profile and a cluster that predict it: `pipeplan calibrate`, docs/calibrate.md."""
