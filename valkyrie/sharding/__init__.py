"""Meshes, logical axes and communication between devices."""
