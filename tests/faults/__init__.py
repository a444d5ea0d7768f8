"""Faults that `bash scripts/faults` injects, with a module for each group."""
