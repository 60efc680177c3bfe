"""`tunesmith plan`."""
