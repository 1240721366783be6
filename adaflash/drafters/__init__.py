"""Drafters: one pass proposes a whole block of candidates."""
