"""Accelerate files, and the mesh that they make of the ranks. Imports no torch."""
