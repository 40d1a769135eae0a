"""Buffers, slots, and what goes into and comes out of a verify pass."""
