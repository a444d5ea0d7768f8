"""Several processes as one run: joined, compared, stopped and supervised."""
