"""The differences between kinds of devices, `cpu` and `cuda`. Any other kind is refused by name.

`backend` has one class for each kind. `selftest_cache` keeps the result of the self-test. No other package asks torch
for the kind of a device.
"""
