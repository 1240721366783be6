"""Prompts: where they come from, how they are rendered, and in which order they are visited."""
