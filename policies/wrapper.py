"""Wrappers of policies: they pass on what they are told and asked."""

from __future__ import annotations

from typing import Any


class Wrapper:
    """A base of policies that pass on to `policy` and have its name.

    A policy of a user's own may hold another one too, and keeps its own name.
    """

    policy: Any


def unwrapped(policy: Any) -> Any:
    """Return the policy inside all wrappers of `policy`; itself if it has none."""
    while isinstance(policy, Wrapper):
        policy = policy.policy
    return policy
