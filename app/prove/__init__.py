"""`tunesmith prove`."""
