"""The differences between kinds of devices, `cpu` and `cuda`. Any other kind is refused by name.

`backend` has one class for each kind, `selftest_cache` what the self-test found. No other package asks torch which kind
a device is of.
"""
