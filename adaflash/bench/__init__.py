"""Measuring: gain against plain decoding, the record of validations, pictures."""
