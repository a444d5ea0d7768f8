"""The steps of a run: atomic saves, verification and restores."""
