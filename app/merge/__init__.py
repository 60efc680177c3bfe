"""`tunesmith merge`: merges adapters or full weights of one base, or averages a run's checkpoints."""
