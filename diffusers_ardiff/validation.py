"""Argument checks whose messages say what was given and what is allowed."""

from __future__ import annotations


def check_int(name: str, value: object, *, minimum: int | None = None, maximum: int | None = None) -> int:
    """Return ``value`` if it is a whole number within bounds.

    Raises:
        ValueError: not an int (bools are not), or outside ``minimum .. maximum``.
    """
    allowed = " ".join(
        part
        for part in (
            "a whole number",
            f">= {minimum}" if minimum is not None else "",
            f"and <= {maximum}" if maximum is not None else "",
        )
        if part
    )
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be {allowed}, got {value!r}.")
    if (minimum is not None and value < minimum) or (maximum is not None and value > maximum):
        raise ValueError(f"{name} must be {allowed}, got {value}.")
    return value
