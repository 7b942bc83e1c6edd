"""Verbs of commands: their own options, and the commands that name none."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from commands.app import COMMANDS
from commands.lazy import leaves
from commands.profile import command as profile
from tests.conftest import ROOT, Run

WITH_VERBS = {name: one for name, one in COMMANDS.items() if one.verbs}
PAIR = ("--target", "t", "--draft", "d", "--out", "o")
TEXTS = (*PAIR, "--prompts", "p")
RUN = ("--run", "r")


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The verb that ran last, in place of the real one, and its options."""
    last: dict[str, Any] = {}
    for name, listed in leaves(WITH_VERBS).items():
        place, _, function = listed.place.partition(":")
        module, verb = import_module(f"commands.{place}"), name.partition(" ")[2]
        real = getattr(module, function)

        def stand_in(verb: str = verb, **given: Any) -> None:
            last.clear()
            last.update(given, verb=verb)
            last.pop("ctx", None)  # it is each call's own

        monkeypatch.setattr(module, function, wraps(real)(stand_in))
    return last


@pytest.mark.parametrize(
    ("command", "flat", "verb"),
    [
        ("profile", (*TEXTS, "--batch", "1,4"), ("pair", *TEXTS, "--batch", "1,4")),
        ("profile", (*TEXTS, "--exit-layers"), ("sources", *TEXTS, "--exit-layers")),
        ("profile", (*TEXTS, "--source=eagle:model=E"),
         ("sources", *TEXTS, "--source", "eagle:model=E")),
        ("profile", (*TEXTS, "--verify", "csd"), ("decode", *TEXTS, "--verify", "csd")),
        ("profile", (*TEXTS, "--method", "csd"), ("decode", *TEXTS, "--method", "csd")),
        ("profile", (*TEXTS, "--papers"), ("decode", *TEXTS, "--papers")),
        ("profile", (*TEXTS, "--run-code"), ("decode", *TEXTS, "--run-code")),
        # Added to the command that recorded.
        ("profile", (*TEXTS, "--chat", "--limit=2", "--batches", "1,4", "--latency-only"),
         ("latency", *PAIR, "--batch", "1,4")),
        ("profile", ("--signals-only", *TEXTS, "--max-gamma", 4), ("signals", *PAIR)),
        ("profile", ("--engine", "vllm", *PAIR[:2], *PAIR[4:]), ("engine", *PAIR[:2], *PAIR[4:])),
        ("validate", RUN, ("run", *RUN)),
        ("validate", (*RUN, "--forced"), ("run", *RUN, "--forced")),
        ("validate", (*RUN, "--source", "pld", "--no-assisted"),
         ("sources", *RUN, "--source", "pld")),
        ("validate", (*RUN, "--batch=1,4"), ("batch", *RUN, "--batch", "1,4")),
        ("validate", (*RUN, "--concurrency", "4"), ("batch", *RUN, "--batch", "4")),
        ("validate", (*RUN, "--verify", "csd"), ("lossy", *RUN, "--verify", "csd")),
        ("validate", (*RUN, "--policy", "csd", "--memory", "m"),
         ("lossy", *RUN, "--policy", "csd", "--memory", "m")),
        ("validate", ("--engine", "vllm", *RUN, "--source", "s", "--http"),
         ("engine", *RUN, "--source", "s", "--http")),
        ("validate", ("--recorded", "a", "--recorded=b", "--markdown", "m"),
         ("recorded", "a", "b", "--markdown", "m")),
        ("simulate", ("--policy", "svip"), ("replay", "--policy", "svip")),
        ("simulate", ("--rounds", "r", "--against=csd"), ("rounds", "r", "--against", "csd")),
        ("simulate", ("--phase", "a=b..c", "--tokenizer", "t", "--phase=d=..e"),
         ("phases", "a=b..c", "d=..e", "--tokenizer", "t")),
        ("simulate", ("--robustness", "--policy", "svip"), ("robustness", "--policy", "svip")),
        ("breakeven", ("--k", "1"), ("surface", "--k", "1")),
        ("breakeven", ("--bench", "a", "--bench=b", "--passes", 1),
         ("bench", "a", "b", "--passes", 1)),
        ("breakeven", ("--plan", "--bench", "a"), ("plan", "--bench", "a")),
        ("sweep", ("--c", "0.1"), ("grid", "--c", "0.1")),
        ("sweep", ("--ladder", "--jobs", 1, "--seed", 3), ("ladder", "--seed", 3)),
        ("sweep", ("--tune", "--policy", "fixed:gamma={1,2}"),
         ("tune", "--policy", "fixed:gamma={1,2}")),
        ("list", ("--json", "-"), ("recordings", "--json", "-")),
        *(("list", ("--json", "-", f"--{verb}"), (verb, "--json", "-"))
          for verb in COMMANDS["list"].verbs if verb != "recordings"),
        ("papers", ("--missing",), ("tables", "--missing")),
        ("papers", ("--measured", "--table", "T"), ("measured", "--table", "T")),
        ("papers", ("--logs", "f"), ("measured", "--logs", "f")),
        ("tune", ("--engine", "vllm", "--context", "9"),
         ("search", "--engine", "vllm", "--context", "9")),
        ("tune", ("--engine", "vllm", "--try", "--requests", "3", "--defaults"),
         ("engine", "--requests", "3", "--defaults")),
    ],
)  # fmt: skip
def test_options_choose_the_verb_that_is_not_named(
    command: str, flat: tuple[str, ...], verb: tuple[str, ...], run: Run, taken: dict[str, Any]
) -> None:
    run(command, *verb).ok()
    named = dict(taken)
    assert named["verb"] == verb[0]
    taken.clear()
    run(command, *flat).ok()
    assert taken == named


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("validate --run r --engine vllm --batch 4",
         "--batch belongs to `draftsim validate batch`; --engine chooses `draftsim validate "
         "engine`: drop one of them"),
        ("validate run --run r --batch 4",
         "--batch belongs to `draftsim validate batch`; this is `draftsim validate run`: drop it, "
         "or name another verb"),
        ("validate --run r --http", "--http belongs to `draftsim validate engine`; this is"),
        ("validate --batch 4 --source pld --run r",
         "--source belongs to `draftsim validate sources` or `engine`; --batch chooses"),
        ("validate --run r --batch 4 --sampled",
         "--sampled belongs to `draftsim validate run` or `lossy`"),
        ("profile --target t --draft d --prompts p --out o --engine-batch 4",
         "--engine-batch belongs to `draftsim profile engine`; this is `draftsim profile pair`"),
        ("profile --target t --draft d --prompts p --out o --max-num-seqs 4",
         "--max-num-seqs belongs to `draftsim profile engine`"),
        ("profile --target t --draft d --prompts p --out o --exit-layers --verify csd",
         "--exit-layers belongs to `draftsim profile sources`; --verify chooses"),
        ("profile --target t --draft d --out o --latency-only --signals-only",
         "--latency-only belongs to `draftsim profile latency`; --signals-only chooses"),
        ("profile --target t --draft d --prompts p --out o --latency-only --force",
         "--force belongs to `draftsim profile pair` or `sources`; --latency-only chooses"),
        ("profile latency --target t --draft d --out o --prompts p",
         "--prompts belongs to `draftsim profile pair` or"),
        ("sweep --c 0.1 --tune", "--c belongs to `draftsim sweep grid`; --tune chooses"),
        ("sweep ladder --latency a --latency b", "sweep ladder` takes one --latency: drop"),
        ("list --policies --rules",
         "--policies belongs to `draftsim list policies`; --rules chooses `draftsim list rules`"),
        ("simulate rounds", "Missing argument"),
        ("simulate --tokenizer t", "--tokenizer belongs to `draftsim simulate phases`; this is"),
        ("profile engin", "profile has no verb 'engin': did you mean `draftsim profile engine`?"),
        ("list bogus", "list has no verb 'bogus': `draftsim list --help` lists its verbs"),
        ("bogus", "there is no command 'bogus': `draftsim --help` lists its commands"),
        ("profile", "Missing option '--target'"),
        ("validate", "Missing option '--run'"),
        ("profile sources --target t --draft d --prompts p --out o", "add --exit-layers, or"),
        ("profile decode --target t --draft d --prompts p --out o", "add --verify RULE"),
        ("validate sources --run r", "no source is named: add --source NAME"),
        ("validate lossy --run r", "no rule is named: add --verify RULE"),
        ("validate recorded", "Missing argument"),
    ],
)  # fmt: skip
def test_an_option_of_another_verb_is_refused_in_a_line(
    arguments: str, said: str, run: Run
) -> None:
    ran = run(*arguments.split())
    assert said in ran.refusal


@pytest.mark.parametrize("command", WITH_VERBS)
def test_verbs_are_listed_with_their_help(command: str, run: Run) -> None:
    said = run(command, "--help").out
    lines = " ".join(said.split())
    assert f"draftsim {command} [VERB] [OPTIONS]" in said
    for verb, one in WITH_VERBS[command].verbs.items():
        assert re.search(rf"^  {verb} .*{re.escape(one.says)}$", said, re.M)
        assert one.says.endswith(".")
    first = next(iter(WITH_VERBS[command].verbs))
    assert f"Without a verb it is `{first}`:" in lines
    assert options_in_help(f"{command} {first}", run) == options_in_help(command, run)


def options_in_help(name: str, run: Run) -> set[str]:
    return set(re.findall(r"^  (?:-h, )?(--[\w-]+)", run(*name.split(), "--help").out, re.M))


def test_the_help_of_a_verb_has_its_own_options(run: Run) -> None:
    assert options_in_help("profile signals", run) == {
        "--target", "--draft", "--out", "--device", "--dtype", "--threads", "--trust-remote-code",
        "--help",
    }  # fmt: skip
    assert options_in_help("validate recorded", run) == {
        "--markdown",
        "--out",
        "--json",
        "--config",
        "--help",
    }
    engine = options_in_help("profile engine", run)
    assert {"--engine", "--eagle", "--minutes"} <= engine
    assert not {"--prompts", "--verify", "--exit-layers", "--device"} & engine
    assert options_in_help("profile --engine vllm", run) == engine
    assert options_in_help("papers measured", run) == {
        "--logs", "--table", "--out", "--json", "--help",
    }  # fmt: skip
    assert not {"--ladder", "--tune", "--tilt", "--verify-ratio"} & options_in_help("sweep", run)


def test_what_is_set_for_other_sources_asks_for_them(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    @contextmanager
    def claimed(*_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(pair=None, info=None)

    monkeypatch.setattr(profile, "_claimed", claimed)
    monkeypatch.setattr(profile, "check_layers_timed", lambda *_: None)
    monkeypatch.setattr(profile, "check_heads_text", lambda *_: None)
    monkeypatch.setattr(profile.recording, "complete", lambda *_: None)
    monkeypatch.setattr(profile, "profile_sources", lambda *_, exits, **__: asked.append(exits))
    for option in (("--source", "early-exit:tau=0.7"), ("--heads-text", "t")):
        run("profile", "sources", *TEXTS, *option).ok()
    assert asked == [True, True]


@pytest.mark.parametrize(
    ("file", "verb"),
    [
        ("run: r\nengine: vllm\nrate: 2\n", "engine"), ("run: r\nbatch: [1, 4]\n", "batch"),
        ("run: r\nconcurrency: 4\n", "batch"), ("run: r\n", "run"),
        ("recorded: [a, b]\n", "recorded"),
    ],
)  # fmt: skip
def test_a_file_of_options_chooses_a_verb_too(
    file: str, verb: str, run: Run, taken: dict[str, Any], tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(file)
    run("validate", "--config", config).ok()
    unnamed = dict(taken)
    assert unnamed["verb"] == verb
    run("validate", verb, f"--config={config}").ok()
    assert taken == unnamed
    if verb == "recorded":
        assert taken["recorded"] == ["a", "b"]


def test_a_file_may_have_what_a_verb_leaves_out(
    run: Run, taken: dict[str, Any], tmp_path: Path
) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("run: r\nbatch: 4\nno_assisted: true\n")
    run("validate", "--config", config).ok()
    assert taken["verb"] == "batch"


def test_a_file_of_options_of_two_verbs_is_refused(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("run: r\nengine: vllm\nbatch: 4\n")
    ran = run("validate", "--config", config)
    assert "--batch belongs to `draftsim validate batch`; --engine chooses" in ran.refusal


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("si", {"simulate"}),
        ("validate e", {"engine"}),
        ("profile --exit", {"--exit-layers"}),
        ("profile engine --minu", {"--minutes"}),
        ("profile --engine vllm --minu", {"--minutes"}),
    ],
)
def test_a_shell_completes_commands_verbs_and_options(words: str, offered: set[str]) -> None:
    asked = {
        "_DRAFTSIM_COMPLETE": "complete_bash", "COMP_WORDS": f"draftsim {words}",
        "COMP_CWORD": str(len(words.split())),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, str(ROOT / "draftsim.py")], env={**os.environ, **asked},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == offered


@pytest.mark.parametrize("verb", [(), ("replay",)], ids=str)
def test_an_option_that_counts_once_is_said_where_it_is_repeated(
    run: Run, verb: tuple[str, ...]
) -> None:
    asked = ("simulate", *verb, "--policy", "fixed", "--policy", "svip", "--verify", "typical")
    assert "times" not in run(*asked).ok().err
    ran = run(*asked, "--verify", "bild")
    assert "--verify is given 2 times: the last one counts" in ran.ok().said
