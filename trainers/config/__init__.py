"""What a user may ask for: the options, how they are read, and what is refused. Imports no torch."""
