"""Parallel training: one file per kind of parallelism, and shared helpers."""
