"""Faults that scripts/faults.py injects: a module for each kind of them."""
