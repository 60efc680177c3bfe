"""The model: loading, attention, quantization, and proof that it computes what it should."""
