"""The run folder, and the resources of this machine that runs use. Imports no torch."""
