"""Presets: one YAML file each, a complete `TrainConfig`."""
