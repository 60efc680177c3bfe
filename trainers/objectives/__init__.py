"""One file per objective: its columns, its collation, its loss."""
