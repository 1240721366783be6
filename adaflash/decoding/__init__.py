"""The decoding engine: draft, choose a length, verify, accept."""
