"""`tunesmith eval`: compares models on the same rows."""
