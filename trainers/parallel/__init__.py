"""One file per kind of parallelism, and what they share."""
