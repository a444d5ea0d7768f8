"""Trained models at work: texts read, scored and continued."""
