"""Hybrid language models and their checkpoints."""
