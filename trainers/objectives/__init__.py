"""Training losses: supervised fine-tuning, preferences, and load balancing of experts."""
