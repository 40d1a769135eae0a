"""Layers that models and drafters share."""
