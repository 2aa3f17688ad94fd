"""The differences between kinds of devices, `cpu` and `cuda`. Any other kind is refused by name.

`backend` has one class for each kind, and `streams` the streams beside computing on which messages wait. No other
package asks torch which kind a device is of.
"""
