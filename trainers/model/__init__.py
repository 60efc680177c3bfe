"""The model: loading, attention, quantization, and checks that it computes correctly."""
