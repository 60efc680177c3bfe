"""`tunesmith bench`."""
