"""Recurrent sequence mixers and the scans that they share."""
