"""``speculation_profile.json``: written from recordings, read as one, and refused if damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policies.lengths.basic import Fixed
from tests.conftest import Run
from traces.errors import FileError
from traces.replay.run import replay
from traces.replay.vectorised import replay_many
from traces.sources.as_draft import drafted_trace
from traces.sources.registry import parse_source
from traces.store.recordings import find_trace
from traces.store.speculation_profile import (
    SpeculationProfile,
    is_profile,
    read_profile,
    write_profile,
)

KEYS = {
    "schema_version", "measured", "method", "draft_checkpoint", "target_model",
    "num_speculative_tokens", "block_size", "max_supported_k", "verification_method",
    "conditional_accept_rates", "marginal_accept_rates", "mean_accept_length",
    "mean_accept_length_per_request", "accept_length_model", "accept_length_by_k",
    "acceptance_length_histogram", "per_category", "measurement_conditions", "validation",
}  # fmt: skip
"""Keys that Model-Optimizer's ``build_profile`` writes."""


def test_an_export_begins_with_its_result(tmp_path: Path, run: Run) -> None:
    out = tmp_path / "speculation_profile.json"
    command = ("export", "speculation-profile", "--trace", "bundled", "--out", out)
    ran = run(*command)
    said = ran.said
    length = json.loads(out.read_text())["mean_accept_length"]
    assert said.startswith("bundled (bundled 2.81M + draft model 0.638M")
    assert f"acceptance length {length:.3g} at draft length 8, from" in said
    assert "at the costs of" not in said  # nothing is priced
    assert f"wrote {out}" in said
    assert "conditional" not in ran.out  # the page of terms says alpha and survival
    refused = run(*command, "--draft-length", 40)
    assert "--draft-length 40: bundled has drafts of up to 24 tokens" in refused.refusal


def test_a_recordings_profile_has_the_schemas_keys_and_its_own_rounds(
    tmp_path: Path, run: Run
) -> None:
    out = tmp_path / "speculation_profile.json"
    ran = run("export", "speculation-profile", "--trace", "bundled", "--draft-length", 4, "--out",
              out, "--json", "-")  # fmt: skip
    document = json.loads(out.read_text())
    assert set(document) == KEYS
    rounds = replay(find_trace("bundled"), Fixed(4)).rounds
    accepted = rounds["accepted"][rounds["drafted"] == 4]
    assert document["mean_accept_length"] == pytest.approx(1 + accepted.mean(), abs=1e-6)
    assert document["acceptance_length_histogram"] == {
        str(k + 1): int((accepted == k).sum()) for k in range(5)
    }
    for i, row in enumerate(ran.rows):
        assert row["survival"] == pytest.approx((accepted > i).mean())
        assert document["marginal_accept_rates"][i] == pytest.approx(row["survival"], abs=1e-6)
    assert document["validation"]["mean_consistency"]["abs_delta"] < 1e-4
    # Read again, nothing is lost.
    again = read_profile(out)
    assert sum(again.histogram) == len(accepted)
    assert again.conditional == pytest.approx(document["conditional_accept_rates"], abs=1e-5)


def test_a_lookups_profile_counts_the_rounds_without_a_draft(tmp_path: Path, run: Run) -> None:
    """Most searches for an n-gram find nothing here: their positions count as rejected."""
    out = tmp_path / "speculation_profile.json"
    run("export", "speculation-profile", "--trace", "bundled", "--source", "ngram",
        "--draft-length", 3, "--out", out).ok()  # fmt: skip
    trace = drafted_trace(find_trace("bundled"), parse_source("ngram"), {})
    [log] = replay_many(trace, [("fixed", Fixed(3))])
    found = read_profile(out)
    assert found.mean_length == pytest.approx(log.rounds["emitted"].mean(), rel=0.02)
    assert sum(found.histogram) > 0.9 * len(log)
    same = run("doctor", out, "--against", "bundled", "--source", "ngram", "--draft-length", 3)
    assert same.ok().err.startswith("as expected: ")


def test_a_profile_is_read_as_a_recording(tmp_path: Path, run: Run) -> None:
    path = tmp_path / "speculation_profile.json"
    profile = SpeculationProfile((0.7, 0.5, 0.3), method="eagle3", draft="head", target="model")
    write_profile(profile, path)
    assert is_profile(path)
    trace = find_trace(path)
    for k in (1, 2, 3):
        rounds = replay(trace, Fixed(k)).rounds
        whole = rounds["accepted"][rounds["drafted"] == k]
        error = whole.std() / np.sqrt(len(whole))
        assert abs(whole.mean() - sum(profile.marginal[:k])) < 4 * error
    ran = run("simulate", "--trace", path, "--latency", "const:target=1,draft=0.1", "--policy",
              "fixed:gamma=2", "--json", "-")  # fmt: skip
    assert "drawn from the profile's acceptance by position" in ran.err
    row = next(r for r in ran.rows if r["policy"] == "fixed:gamma=2")
    assert row["speedup"] == pytest.approx((1 + 0.7 + 0.5) / 1.2, rel=0.03)
    counts = run("import", "auto", path, "--json", "-")
    assert [r["survival_lo"] for r in counts.rows] == [0.7, 0.5, 0.3]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"measured": False}, "nobody measured"),
        ({"marginal_accept_rates": [0.5, 0.6, 0.1], "conditional_accept_rates": None,
          "mean_accept_length": None}, "do not rise"),
        ({"marginal_accept_rates": [0.5, 0.4, 0.1]}, "are not the products"),
        ({"mean_accept_length": 3.0}, "the rates sum to 2.5"),
        ({"num_speculative_tokens": 4}, "with 3 acceptance rates"),
        ({"conditional_accept_rates": [1.7, 0.1, 0.1]}, "list of rates between 0 and 1"),
        ({"conditional_accept_rates": None, "marginal_accept_rates": None,
          "vectors_unavailable_reason": "block verification"}, "block verification"),
        ({"acceptance_length_histogram": {"1": 9, "4": 1}}, "contradicts the acceptance rates"),
        ({"acceptance_length_histogram": {"9": 4}}, "histogram is 9, expected at most 4"),
        ({"acceptance_length_histogram": {"²": 4}}, "histogram is '²', expected a whole number"),
    ],
)  # fmt: skip
def test_a_profile_that_contradicts_itself_is_refused(
    change: dict[str, Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "speculation_profile.json"
    document = SpeculationProfile((0.7, 0.5, 0.3)).document() | change
    path.write_text(json.dumps(document))
    with pytest.raises(FileError, match=said):
        read_profile(path)


def test_a_recording_without_latencies_has_a_profile(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    ran = run("export", "speculation-profile", "--trace", "qwen-coder-t1-cpu", "--out", path)
    greedy = run("export", "speculation-profile", "--trace", "qwen-coder-cpu", "--out", path)
    assert ran.code == greedy.code == 0, (ran.err, greedy.err)
    assert len(json.loads(path.read_text())["marginal_accept_rates"]) == 8
