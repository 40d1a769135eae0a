"""Drafting, verifying and accepting: the speculative loop and its parts."""
