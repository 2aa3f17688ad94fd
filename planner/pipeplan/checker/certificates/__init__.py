"""Verifies the certificate that no plan is faster: reads the states of its search, and checks that they are closed.

docs/proof.md states the rules and proves that they suffice.
"""
