"""Training options: their definition, parsing and validation. Imports no torch."""
