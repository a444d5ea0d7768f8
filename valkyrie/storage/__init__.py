"""Files and locks of the places where runs are, on disk or in a bucket."""
