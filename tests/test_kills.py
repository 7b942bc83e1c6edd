"""Every command that writes, killed at a seeded moment, ends in the answer of one that was not.

``DRAFTSIM_KILLS=20`` makes twenty chains a command, each killed three times; `tests.kills` by
itself kills the real program.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from itertools import count
from pathlib import Path

import pytest

from tests.kills import COMMANDS, SIGNALS, Chain, Stop, called_run, forked_run, inputs

pytestmark = pytest.mark.usefixtures("short_chains")

CHAINS = int(os.environ.get("DRAFTSIM_KILLS", "0"))
KILLS = len(SIGNALS) if CHAINS else 1


@pytest.mark.invariant(13)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_killed_command_comes_to_the_same_answer(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    command = COMMANDS[name]
    if command.models and find_spec("torch") is None:
        pytest.skip("needs torch")
    run = request.getfixturevalue("small_run") if command.begins_in == "profiled" else None
    (tmp_path / "given").mkdir()
    given = inputs(tmp_path / "given", run)
    chain = Chain(name, forked_run, given, tmp_path, whole=called_run)
    landed: list[Stop] = []
    # One kill is another command's next signal.
    first = list(COMMANDS).index(name)
    last = first + max(CHAINS, 1)
    seeds = count(first)
    while (seed := next(seeds)) < last or not landed:
        assert seed < last + 3, "no kill came before its end"
        landed += chain.killed(seed, KILLS)
