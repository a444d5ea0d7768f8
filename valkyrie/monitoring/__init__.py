"""What a run tells about itself: hooks, metrics, writers, reports."""
