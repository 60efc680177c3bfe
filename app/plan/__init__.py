"""`tunesmith plan`: estimates memory and speed under each strategy."""
