"""Gin files and flags: parsing, checks, loading and records."""
