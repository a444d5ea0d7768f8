"""Gin files and flags: parsed, checked, loaded and recorded."""
