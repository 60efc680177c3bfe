"""`tunesmith prove`: compares training under each strategy with a single process."""
