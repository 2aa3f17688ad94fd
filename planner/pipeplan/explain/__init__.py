"""Why a plan is what it is: its bottleneck, its rivals, what other machines would give, how firmly it stands."""
