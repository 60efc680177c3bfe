"""Checkpoints, their remote copies, and exports."""
