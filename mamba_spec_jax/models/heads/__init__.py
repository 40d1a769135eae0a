"""Draft heads: small modules on a target's hidden states, and the checkpoints they come in."""
