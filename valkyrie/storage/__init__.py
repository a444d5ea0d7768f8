"""Locks of runs, on a disk or in a bucket, and the objects of buckets."""
