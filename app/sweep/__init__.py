"""`tunesmith sweep`: many runs that differ in a few options, in the ordinary queue."""
