"""Training losses: supervised fine-tuning and load balancing of experts."""
