"""Errors that a user can mend: shown as one message, without a traceback."""


class UserError(ValueError):
    """Says what was wrong, where (file:line or config key), what is allowed and how to mend it."""
