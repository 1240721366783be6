"""Errors that a user can mend: shown as one message, without a traceback."""


class UserError(ValueError):
    """Says what was wrong, where (file:line or config key), what is allowed and how to mend it."""


def at_least_one(where: str, **values: int) -> None:
    """Raises UserError for a count below 1, with its key."""
    for name, value in values.items():
        if value < 1:
            raise UserError(f"{where}.{name} must be at least 1, got {value}")
