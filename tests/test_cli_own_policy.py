"""A policy of a user's own, named by its file: in every command, with parameters and bounds."""

from __future__ import annotations

import sys
from pathlib import Path

from policies import Fixed, GammaTune, describe
from policies.from_file import digestible, file_of, load_file
from tests.conftest import ROOT, Run

OWN = """
from policies import BatchPolicy, DraftPolicy

class Careful(DraftPolicy):
    reads = ("prob",)

    def __init__(self, threshold: float = 0.5, gamma: int = 8) -> None:
        self.threshold, self.gamma = threshold, gamma

    def keep_drafting(self, draft):
        return len(draft) < self.gamma and (not draft or draft[-1].prob > self.threshold)

class Endless(DraftPolicy):
    def keep_drafting(self, draft):
        return "yes"

class Longer(Careful):
    def __init__(self, threshold: float = 0.5, gamma_max: int = 40) -> None:
        self.threshold, self.gamma, self.gamma_max = threshold, gamma_max, gamma_max

class Unbounded(DraftPolicy):
    reads = ("prob",)

    def keep_drafting(self, draft):
        return len(draft) < 40 and (not draft or draft[-1].prob > 0.3)

class Misled(DraftPolicy):
    def __init__(self, gamma=2):
        self.gamma = gamma

    def keep_drafting(self, draft):
        return len(draft) < self.gamma + 2

class Shared(BatchPolicy):
    def __init__(self, gamma=3):
        self.gamma = gamma

    def plan(self, loads):
        return self.gamma if len(loads) < 2 else 1

class Drifting(BatchPolicy):
    def __init__(self):
        self._last = 8

    def plan(self, loads):
        return self._last * 5

    def observe(self, outcomes):
        self._last = outcomes[0].accepted + 1

class Wrapped(DraftPolicy):
    def __init__(self, gamma: int = 3):
        self.gamma, self.policy = gamma, Careful()

    def keep_drafting(self, draft):
        return len(draft) < self.gamma

class AtRun(DraftPolicy):
    length = 6

    def for_run(self):
        mine = self.copy()
        mine.length -= 2
        return mine

    def fresh(self):
        mine = self.copy()
        mine.length -= 2
        return mine

    def keep_drafting(self, draft):
        return len(draft) < self.length

class AtRunBounded(AtRun):
    longest = 6

class Other:
    pass
"""

RUN_AS_PYTHON = """
from __future__ import annotations
from dataclasses import dataclass
from helper import LENGTH, Helped, asked
from policies import DraftPolicy
from policies.lengths.gammatune import GammaTune

print("said")

@dataclass
class Mine(DraftPolicy):
    gamma: int = LENGTH

    def keep_drafting(self, draft):
        asked()
        return len(draft) < self.gamma

Made = type("Made", (Mine,), {})
"""

HELPER = """
from policies import DraftPolicy

class Helped(DraftPolicy): ...

def asked():
    print("asked")
"""


def test_a_policy_of_ones_own(synthetic_run: Path, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    command = ["simulate", "--trace", synthetic_run, "--json", "-", "--policy"]
    rows = run(*command, f"{file}:Careful:threshold=0.25").rows
    assert [r["policy"] for r in rows[:2]] == ["autoregressive", "mine.py:Careful:threshold=0.25"]
    assert [r["note"] for r in rows] == [None, None, "best fixed"]
    # A policy that holds another one has its own name.
    assert run(*command, f"{file}:Wrapped").rows[1]["policy"] == "mine.py:Wrapped"
    assert rows[1]["against"] == rows[2]["policy"]
    for verb in ("simulate", "serve"):
        again = run(verb, *command[1:], f"{file}:Careful:threshold=0.25+exact").rows
        assert again[1]["policy"] == "mine.py:Careful:threshold=0.25+exact"
        assert again[1]["verify"] == "exact"
    for text, message in (
        (f"{file}", f"names a file and no policy: write {file}:CLASS"),
        (f"{file}:Carefull", "has no class 'Carefull'"),
        (f"{file}:Other", "no DraftPolicy"),
        (f"{file}:Endless", "Endless"),
        (f"{file}:Careful:treshold=1", "did you mean 'threshold'"),
        (f"{tmp_path}/none.py:Careful", "no such file"),
    ):
        ran = run(*command, text)
        assert message in ran.refusal


def test_a_file_is_run_as_python_would_run_it(
    synthetic_run: Path, tmp_path: Path, run: Run
) -> None:
    """Its helpers are found, what it prints is no result, and no other class gets its mark."""
    path, found = [*sys.path], []
    for folder, length in (("a", 2), ("b", 3), ("b", 4)):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "helper.py").write_text(f"{HELPER}LENGTH = {length}")
        file = tmp_path / folder / "mine.py"
        file.write_text(RUN_AS_PYTHON)
        found.append(load_file(f"{file}:Mine", 24).policy)
        assert found[-1].longest_draft() == length
    assert len({file_of(policy) for policy in found}) == 3
    assert sys.path == path
    assert not [name for name in sys.modules if name == "helper" or name.startswith("mine ")]
    ran = run("simulate", "--trace", synthetic_run, "--json", "-", "--policy", f"{file}:Mine")
    assert ran.rows[1]["policy"] == "mine.py:Mine"
    assert "said" in ran.err
    assert "asked" in ran.err
    assert load_file(f"{file}:Made").name == "mine.py:Made"
    for other in ("GammaTune", "Helped"):
        ran = run("simulate", "--trace", synthetic_run, "--policy", f"{file}:{other}")
        assert f"imports {other!r}: name a class that the file defines" in ran.refusal
    assert file_of(GammaTune()) is None
    assert describe(GammaTune()) == "gammatune"


def test_a_cut_policy_begins_runs_and_requests_as_it_would_uncut(
    synthetic_run: Path, tmp_path: Path, run: Run
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    own = ("--policy", f"{file}:AtRun", "--policy", f"{file}:AtRunBounded")
    for command, more in (("simulate", ()), ("serve", ("--batch", 2, "--requests", 6))):
        rows = run(command, "--trace", synthetic_run, *more, "--json", "-", *own).rows
        [cut, bounded] = [row for row in rows if row["policy"].startswith("mine.py")]
        same = ("rounds", "drafted", "accepted", "tokens_per_round", "throughput_tok_s")
        assert [cut.get(key) for key in same] == [bounded.get(key) for key in same]
        assert any(cut.get(key) for key in same)


def test_two_files_with_one_name_are_not_taken_for_one(tmp_path: Path, run: Run) -> None:
    files = []
    for folder, gamma in (("a", 2), ("b", 5)):
        (tmp_path / folder).mkdir()
        file = tmp_path / folder / "mine.py"
        file.write_text(OWN.replace("gamma: int = 8", f"gamma: int = {gamma}"))
        files.append(file)
    for command, rule in (("simulate", ""), ("serve", ""), ("simulate", "+rejection-sampling"),
                          ("simulate", "+lossy-global")):  # fmt: skip
        texts = [part for file in files for part in ("--policy", f"{file}:Careful{rule}")]
        ran = run(command, "--trace", "bundled", *texts)
        assert "another file's policy has the name mine.py:Careful" in ran.refusal


def test_a_policy_of_ones_own_is_held_to_the_longest_draft_there_is(
    synthetic_run: Path, tmp_path: Path, run: Run
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    for command, more in (("simulate", ()), ("serve", ("--batch", 1, "--requests", 6))):
        ran = run(
            command, "--trace", synthetic_run, *more, "--json", "-", "--policy", f"{file}:Longer",
            "--policy", f"{file}:Unbounded", "--policy", f"{file}:Drifting",
            "--policy", f"{file}:Drifting",
        )  # fmt: skip
        own = ["mine.py:Unbounded", "mine.py:Drifting"]
        shown = [row["policy"] for row in ran.rows]
        assert shown[1:4] == ["mine.py:Longer:gamma_max=24", *own]
        for name in own:
            assert (
                f"{name} sets no longest draft: it is cut at length 24, the recording's longest "
                "(set an attribute gamma_max, or define longest_draft())" in ran.err
            )
        assert "Longer sets" not in ran.err
    ran = run("simulate", "--trace", synthetic_run, "--policy", f"{file}:Misled")
    assert "drafted 4 tokens, but its longest draft is 2: set an attribute gamma_max" in ran.refusal


def test_a_policy_for_batches_of_ones_own(synthetic_run: Path, tmp_path: Path, run: Run) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    command = ("--trace", synthetic_run, "--json", "-", "--policy")
    rows = run("simulate", *command, f"{file}:Shared").rows
    assert rows[1]["policy"] == "mine.py:Shared"
    rows = run(
        "serve", *command, f"{file}:Shared:gamma=2", "--batch", "1,2", "--requests", 6
    ).rows  # fmt: skip
    assert {row["policy"] for row in rows} == {"autoregressive", "mine.py:Shared:gamma=2"}


def test_a_policy_of_ones_own_is_swept_and_searched(
    synthetic_run: Path, tmp_path: Path, run: Run
) -> None:
    """Several settings of one class, in processes of their own, and gone on with."""
    file = tmp_path / "mine.py"
    file.write_text(OWN)
    command = ("sweep", "--trace", synthetic_run, "--resamples", 4, "--json", "-")
    swept = ("--c", "0.1,0.2", "--policy", f"{file}:Careful:threshold={{0.2,0.5}}")
    for jobs in (1, 2):
        rows = run(*command, *swept, "--jobs", jobs).rows
        assert {r["policy"] for r in rows} == {
            "mine.py:Careful:threshold=0.2", "mine.py:Careful",
        }  # fmt: skip
    rows = run(*command, "--policy", f"{file}:Careful", "--gamma", "1..3", "--jobs", 1).rows
    assert [r["policy"] for r in rows if "gamma=" in r["policy"]]
    rows = run(*command, "--policy", f"{file}:Careful:threshold={{0.1,0.3}}", "--tune").rows
    assert rows[1]["policy"] == "mine.py:Careful:threshold=0.5"


def test_what_a_study_is_of_changes_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    found = []
    for limit in (8, 9, 8):
        file.write_text(OWN.replace("gamma: int = 8", f"gamma: int = {limit}"))
        found.append(digestible({"it": load_file(f"{file}:Careful", 4).policy}))
    assert found[0] != found[1]
    assert found[0] == found[2]
    plain = {"fixed": Fixed(3)}
    assert digestible(plain) == plain


def test_the_policy_of_the_tutorial_takes_its_parameters(
    synthetic_run: Path, tmp_path: Path, run: Run
) -> None:
    shown = (ROOT / "docs/policy.md").read_text(encoding="utf-8").split(">>> class ", 1)[1]
    lines = [line[4:] for line in shown.splitlines() if line.startswith("... ")]
    file = tmp_path / "mine.py"
    head = f"from policies import DraftPolicy\n\nclass {shown.splitlines()[0]}\n"
    file.write_text(head + "\n".join(lines))
    rows = run(
        "simulate", "--trace", synthetic_run, "--json", "-",
        "--policy", f"{file}:StopWhenUnsure:threshold=0.4",
    ).rows  # fmt: skip
    assert rows[1]["policy"] == "mine.py:StopWhenUnsure:threshold=0.4"
