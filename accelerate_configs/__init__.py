"""Strategies: one Accelerate YAML file each."""
