"""What runs inside every rank: one training script and its parts."""
