"""Storage of runs that are not on a file system."""
