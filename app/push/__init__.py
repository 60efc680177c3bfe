"""Publishes exports on the Hugging Face Hub."""
