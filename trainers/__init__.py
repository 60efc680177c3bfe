"""What runs inside every rank: one training script and its parts."""

import logging

# peft imports bitsandbytes, which warns on some CPUs that it lacks a kernel for inference; it is never used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
