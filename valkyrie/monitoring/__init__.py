"""Metrics, writers, progress and reports of a run."""
