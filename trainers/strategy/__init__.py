"""Parsing and validation of Accelerate files, and the device mesh that they define. Imports no torch."""
