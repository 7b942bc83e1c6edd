"""Errors a person can act on: every message says what, where and what to do."""

from policies.errors import DraftsimError as DraftsimError  # noqa: PLC0414


class FileError(DraftsimError):
    """A file that is missing, truncated, corrupted, of another schema or inconsistent."""


class TailError(DraftsimError):
    """A policy drafted past what the trace recorded off the path."""


class SignalError(DraftsimError):
    """A policy or rule reads a signal that the trace does not hold."""
