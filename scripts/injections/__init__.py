"""Faults that scripts/faults.py injects, with a module for each group."""
