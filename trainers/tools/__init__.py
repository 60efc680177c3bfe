"""Programs that `app/` starts and that are no ranks, and the check before a run."""
