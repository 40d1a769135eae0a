"""Sources of drafts."""
