"""Locks of runs, on a disk or in a bucket, the objects of buckets, and what this program made."""
