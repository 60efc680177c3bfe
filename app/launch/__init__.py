"""Starts and ends processes."""
