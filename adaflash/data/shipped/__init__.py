"""Prompts of our own making that ship with the package."""
