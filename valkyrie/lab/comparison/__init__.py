"""Comparisons: candidates, trained by ordinary runs on one text, and their tables."""
