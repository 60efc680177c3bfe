"""One file per small verb."""
