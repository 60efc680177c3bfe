"""Checkpoints, their copies elsewhere, and exports."""
