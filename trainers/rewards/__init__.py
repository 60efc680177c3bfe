"""Rewards of sampled answers, computed in a process of their own. Imports no torch."""
