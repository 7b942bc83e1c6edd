"""The base of every error that a person can act on: its message says what, where and what to do."""

from __future__ import annotations


class DraftsimError(Exception):
    """Bad input.  The command line prints the message in one line and exits with 2."""


class TextError(DraftsimError, ValueError):
    """A text that is not of the form ``key=value,key=value``, or has other keys."""
