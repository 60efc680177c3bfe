"""A run on disk and on this machine. Imports no torch."""
