"""Verifies the certificate that no plan is faster: the states of its search, and that they are closed under stages.

docs/proof.md states the rules and proves that they suffice.
"""
