"""`tunesmith doctor`: checks a machine, or several together, before a run."""
