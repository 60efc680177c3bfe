"""Programs that `app/` starts besides the training ranks, and the pre-flight check of a run."""
