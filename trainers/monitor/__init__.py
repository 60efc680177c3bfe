"""What watches a run: heartbeats, metrics, losses gone wrong, slow ranks."""
