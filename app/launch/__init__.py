"""Starts, supervises and stops the processes of a run."""
