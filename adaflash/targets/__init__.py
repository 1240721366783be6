"""The frozen target: an adapter over a Hugging Face causal language model."""
