"""Monitoring of a run: heartbeats, metrics, loss checks, slow ranks."""
