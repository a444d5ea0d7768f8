"""Runs of several processes: start-up, consistency checks, preemption and supervision."""
