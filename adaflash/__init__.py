"""Train adaptive diffusion drafters for speculative decoding, and measure what they gain."""

__version__ = "0.1.0"
