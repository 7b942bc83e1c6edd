"""From a server's benchmark files and counters to a setting."""

from __future__ import annotations

import gzip
import json
import shlex
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from simulator.aggregate.benches import read_benches
from simulator.aggregate.observed import read_acceptance
from simulator.aggregate.server import calibrate
from simulator.tune.formats import check_settings
from tests.conftest import Run
from tests.logs import vllm_counters
from traces.digits import three_digits
from traces.errors import DraftsimError

pytestmark = pytest.mark.usefixtures("short_chains")


def served(concurrency: int, speed: float, accepted: tuple[float, ...] = ()) -> dict[str, Any]:
    """A result as `vllm bench serve --save-result` writes it (the fields that are read).

    The requests stay as long as the speed says if all of them always run (Little's law).
    """
    row: dict[str, Any] = {
        "backend": "vllm", "model_id": "org/target", "completed": 64,
        "total_input_tokens": 64 * 900, "total_output_tokens": 64 * 256,
        "request_throughput": speed / 256, "output_throughput": speed,
        "max_concurrency": concurrency, "mean_ttft_ms": 60.0,
        "mean_tpot_ms": (concurrency * 256 / speed * 1e3 - 60.0) / 255,
    }  # fmt: skip
    if accepted:
        row |= {
            "spec_decode_num_drafts": 1000, "spec_decode_draft_tokens": 1000 * len(accepted),
            "spec_decode_acceptance_length": 1 + sum(accepted),
            "spec_decode_per_position_acceptance_rates": list(accepted),
        }  # fmt: skip
    return row


ACCEPTED = (0.72, 0.48, 0.32, 0.21, 0.14)
A100 = {
    "plain-1": served(1, 90.7), "plain-8": served(8, 627), "plain-32": served(32, 1588),
    "head-1": served(1, 194, ACCEPTED), "head-8": served(8, 1099, ACCEPTED),
    "head-32": served(32, 1934, ACCEPTED),
}  # fmt: skip
"""Speeds of Llama-3-8B with EAGLE-3 on an A100 (../shared/tables), gsm8k."""


def written(folder: Path, rows: Mapping[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, row in rows.items():
        (folder / f"{name}.json").write_text(json.dumps(row))
    return folder


def test_a_folder_of_runs_gives_a_setting_that_vllm_takes(tmp_path: Path, run: Run) -> None:
    folder, out = written(tmp_path / "results", A100), tmp_path / "speculative.json"
    ran = run(
        "recommend", "--bench", folder, "--draft", "org/head", "--method", "eagle3", "--out", out
    ).ok()
    lines = ran.err.splitlines()
    first = next(line for line in lines if ": K = " in line).partition(": ")[2]
    assert "up to 32 requests; at 1 request" in first
    assert "80% interval" in first
    words = shlex.split(lines[-1])
    assert words[:3] == ["vllm", "serve", "org/target"]
    setting = json.loads(words[words.index("--speculative-config") + 1])
    assert setting["method"] == "eagle3"
    assert setting["model"] == "org/head"
    check_settings("vllm", {k: v for k, v in setting.items() if k not in ("method", "model")})
    assert json.loads(out.read_text()).items() <= setting.items()
    assert any("measure next: " in line for line in lines)
    apart, close = (
        run("recommend", "--bench", folder, "--batch", b).ok().err for b in ("1,8", "4,8")
    )
    assert "no batch between 1 and 8 was searched" in apart
    assert "was searched" not in close


@pytest.mark.parametrize("engine", ["sglang", "tensorrt-llm", "llamacpp", "hf"])
def test_every_engine_gets_a_command(engine: str, tmp_path: Path, run: Run) -> None:
    folder = written(tmp_path / "results", {k: A100[k] for k in ("plain-1", "head-1")})
    asked = ("--engine", engine, "--bench", folder, "--draft", "org/head", "--json", "-")
    document = run("recommend", *asked).document
    k = document["results"][0]["k"]
    assert k >= 3
    assert str(k) in document["launch"]
    # llama.cpp loads a GGUF file, which the model's name is not.
    assert ("TARGET" if engine == "llamacpp" else "org/target") in document["launch"]


def test_an_unknown_engine_is_refused(run: Run) -> None:
    assert "'tgi' is not one of 'vllm', " in run("recommend", "--engine", "tgi").refusal


def test_acceptance_is_that_of_all_steps_if_some_had_no_draft(tmp_path: Path) -> None:
    """vLLM counts n-grams' acceptance over the steps with a draft: 900 of 3,600 steps here."""
    row = served(4, 800.0, (0.8, 0.4)) | {
        "completed": 40, "total_output_tokens": 40 + 3600 + 1080, "spec_decode_num_drafts": 900,
        "spec_decode_draft_tokens": 1300, "spec_decode_accepted_tokens": 1080,
        "num_speculative_tokens": 2,
    }  # fmt: skip
    del row["mean_ttft_ms"]  # of other lengths
    written(tmp_path, {"ngram": row})
    found = read_benches([str(tmp_path / "ngram.json")])
    assert found.runs[0].accepted == pytest.approx((0.2, 0.1))
    assert found.runs[0].round_tokens == pytest.approx((3600 + 1080) / 3600)
    assert found.runs[0].drafted == pytest.approx(1300 / 3600)
    assert "25% of the steps had a draft" in found.notes[0]
    told = read_acceptance(str(tmp_path / "ngram.json"))
    assert told.note == "25% of the steps had a draft: acceptance is taken over all steps"
    # Requests that end take some drafts away everywhere.
    row["spec_decode_num_drafts"] = 3400
    written(tmp_path, {"head": row})
    found = read_benches([str(tmp_path / "head.json")])
    assert (found.runs[0].accepted, found.notes) == ((0.8, 0.4), [])


def test_drafts_that_differ_in_length_keep_all_positions(tmp_path: Path) -> None:
    """Half of the drafts have 2 tokens, half 8, as suffix decoding's or a dynamic K's."""
    survival = [(0.6**k * (k <= 2) + 0.9**k) / 2 for k in range(1, 9)]
    row = {**served(4, 450.0, tuple(survival)), "spec_decode_draft_tokens": 5000}
    folder = written(tmp_path, {"plain": served(4, 256.0), "suffix": row})
    for text in (folder / "suffix.json", f"{folder}/suffix.json@8"):
        [run] = read_benches([str(text)]).runs
        assert (run.k, run.drafted, run.accepted) == (8, 5.0, tuple(survival))
    server = calibrate(read_benches([str(folder)]).runs)
    # The longest draft length is predicted with the drafts that it had.
    assert [(run.k, run.verified) for run in server.stopping()] == [(8, 5.0)]
    # Drafts of one length.
    written(tmp_path, {"head": served(4, 450.0, ACCEPTED)})
    assert read_benches([str(tmp_path / "head.json")]).runs[0].drafted is None


def files_of(folder: Path, k: int) -> list[str]:
    """Return the files of `A100` with the draft length of those with a head."""
    return [f"{folder}/{name}.json@{k if 'head' in name else 0}" for name in A100]


def test_costs_fitted_to_an_estimated_acceptance_are_not_told_for_another(
    tmp_path: Path, run: Run
) -> None:
    """Runs without acceptance do not tell if drafts are dear or seldom right."""
    bare = {name: {k: v for k, v in row.items() if not k.startswith("spec_decode")}
            for name, row in A100.items()}  # fmt: skip
    files = files_of(written(tmp_path / "bare", bare), 5)
    bench = [part for file in files for part in ("--bench", file)]
    costs, other = tmp_path / "costs.parquet", ("--acceptance", "0.9,0.8,0.7,0.6,0.5")
    warning = "the runs tell no acceptance"
    assert warning not in run("calibrate", *files, "--out", costs).ok().said
    for asked in (
        ("recommend", *bench, *other), ("calibrate", *files, *other),
        ("breakeven", *bench, *other), ("simulate", "--latency", costs, *other),
    ):  # fmt: skip
        assert warning in run(*asked).ok().said
    told = written(tmp_path / "told", A100)
    assert warning not in run("recommend", "--bench", told, *other).ok().said


def test_counters_say_what_runs_do_not(tmp_path: Path, run: Run) -> None:
    """Runs without acceptance, and /metrics before and after: as with acceptance in the runs."""
    bare = {name: {k: v for k, v in row.items() if not k.startswith("spec_decode")}
            for name, row in A100.items()}  # fmt: skip
    folder = written(tmp_path / "bare", bare)
    scrapes = []
    for number, count in enumerate((500, 10_500)):
        accepted = [round(count * chance) for chance in ACCEPTED]
        scrapes.append(vllm_counters(tmp_path / f"metrics-{number}.txt", count, accepted))
    bench = [part for file in files_of(folder, 5) for part in ("--bench", file)]
    both = ("--metrics", scrapes[0], "--metrics", scrapes[1])
    asked = ("--batch", "1,32", "--json", "-")
    told_by_counters = run("recommend", *bench, *both, *asked).ok()
    told_by_runs = run("recommend", "--bench", written(tmp_path / "full", A100), *asked)
    left, right = ([row["k"] for row in ran.rows] for ran in (told_by_counters, told_by_runs))
    assert left == right
    # Counts of five positions answer for runs of three, too, and not for those of six.
    for k, told in ((3, True), (6, False)):
        bench = [part for file in files_of(folder, k) for part in ("--bench", file)]
        ran = run("recommend", *bench, *both, *asked).ok()
        assert ("is estimated from the speeds" in ran.err) != told
    told, counted = (run("calibrate", *given, "--json", "-").ok() for given in (
        [tmp_path / "full"], [*files_of(folder, 5), *both],
    ))  # fmt: skip
    draft, same = ([row["value"] for row in ran.rows if row["cost"] == "draft"]
                   for ran in (told, counted))  # fmt: skip
    assert same == pytest.approx(draft, rel=0.1)
    alone = run("recommend", *both)
    assert "counters hold acceptance and no costs" in alone.refusal


def test_sglangs_counters_tell_the_acceptance_of_runs_of_one_draft_length(
    tmp_path: Path, run: Run
) -> None:
    """They count rounds and tokens, and no positions: 2,470 tokens of 20 requests in 1,000."""
    metrics = tmp_path / "metrics.txt"
    counts = {"spec_verify_calls": 1000, "generation_tokens": 2470, "num_requests": 20}
    metrics.write_text("".join(f"sglang:{name}_total {n}.0\n" for name, n in counts.items()))
    speeds = {"plain-1": served(1, 90.0), "plain-8": served(8, 627.0),
              "k3-1": served(1, 165.0), "k3-8": served(8, 960.0)}  # fmt: skip
    folder = written(tmp_path / "results", speeds)
    asked = ("recommend", "--engine", "sglang", "--bench", folder, "--json", "-")
    ran = run(*asked, "--metrics", metrics).ok()
    told = {f"{n}": {**row, "accept_length": 2.45} if n[0] == "k" else row
            for n, row in speeds.items()}  # fmt: skip
    same = run("recommend", "--engine", "sglang", "--bench", written(tmp_path / "told", told),
               "--json", "-")  # fmt: skip
    assert ran.rows == same.rows
    # Of two draft lengths nothing says which one was counted.
    written(folder, {"k5-1": served(1, 194.0)})
    two = run(*asked, "--metrics", metrics)
    assert "such as 3:2.45 for drafts of 3" in two.refusal
    # The server's own steps say it.
    metrics.write_text(metrics.read_text() + "sglang:spec_num_steps 3\n")
    assert run(*asked, "--metrics", metrics).code == 0


def test_metrics_come_from_a_url_on_this_machine(tmp_path: Path, run: Run) -> None:
    text = vllm_counters(tmp_path / "metrics.txt", 100, (70,)).read_text()

    class Metrics(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            del args

    server = HTTPServer(("127.0.0.1", 0), Metrics)
    threading.Thread(target=server.handle_request, daemon=True).start()
    one = {"plain": served(1, 90.0), "k1": served(1, 120.0)}
    folder = written(tmp_path / "results", one)
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    ran = run("recommend", "--metrics", url, "--bench", folder)
    server.server_close()
    assert ran.code == 0, ran.err
    far = run("recommend", "--metrics", "http://198.51.100.1/metrics", "--bench", folder)
    assert "is not on this machine" in far.refusal


def test_other_programs_results_are_read(tmp_path: Path) -> None:
    sglang = {**served(4, 300.0), "accept_length": 2.1}
    del sglang["model_id"]
    guide = {"benchmarks": [{"metrics": {
        name: {"successful": {"mean": value}} for name, value in (
            ("request_concurrency", 7.9), ("output_tokens_per_second", 500.0),
            ("prompt_token_count", 256.0), ("output_token_count", 128.0),
            ("time_to_first_token_ms", 40.0),
        )
    }}]}  # fmt: skip
    aiperf = {
        "output_token_throughput": {"unit": "tokens/sec", "avg": 410.0},
        "input_sequence_length": {"avg": 300.0}, "output_sequence_length": {"avg": 100.0},
        "input_config": {"loadgen": {"concurrency": 4}}, "time_to_first_token": {"avg": 50.0},
    }  # fmt: skip
    (tmp_path / "sglang.jsonl").write_text(json.dumps(sglang) + "\n" + json.dumps(sglang) + "\n")
    (tmp_path / "guide.json").write_text(json.dumps(guide))
    (tmp_path / "aiperf.json").write_text(json.dumps(aiperf))
    csv = tmp_path / "runs.csv"
    csv.write_text("max_concurrency,num_speculative_tokens,output_throughput\n2,0,150\n")
    found = read_benches([
        f"{tmp_path}/sglang.jsonl@3", f"{tmp_path}/guide.json", f"{tmp_path}/aiperf.json", str(csv),
    ])  # fmt: skip
    told = [(run.batch, run.k, run.tokens_per_s, run.prompts) for run in found.runs]
    assert told[:2] == [(4, 3, 300.0, 900 / 256)] * 2
    assert told[2] == (8, 0, pytest.approx(500.0 * 8 / 7.9), 2.0)
    assert told[3] == (4, 0, 410.0, 3.0)
    assert told[4][:3] == (2, 0, 150.0)
    assert [run.ttft_s for run in found.runs] == [0.06, 0.06, 0.04, 0.05, None]
    [once] = [line for line in found.notes if "taken as a run without it" in line]
    assert once.startswith(f"{tmp_path}/guide.json and 1 more: does not mention speculation")
    assert once.endswith("otherwise write FILE@K")


def aiperf(concurrency: int | None, speed: float) -> dict[str, Any]:
    """A ``profile_export_aiperf.json`` of schema 1.5, whose configuration has phases."""
    return {
        "schema_version": "1.5",
        "request_throughput": {"unit": "requests/sec", "avg": speed / 100},
        "request_latency": {"unit": "ms", "avg": 1e5 * 8 / speed, "count": 40},
        "output_token_throughput": {"unit": "tokens/sec", "avg": speed},
        "input_sequence_length": {"unit": "tokens", "avg": 300.0, "count": 40},
        "output_sequence_length": {"unit": "tokens", "avg": 100.0, "count": 40},
        "input_config": {
            "models": {"items": [{"name": "org/target"}]},
            "phases": [
                {"name": "warmup", "concurrency": 1, "exclude_from_results": True},
                {"name": "profiling", "type": "concurrency", "concurrency": concurrency},
            ],
        },
    }  # fmt: skip


def test_folders_of_aiperf_tell_concurrency_draft_length_and_model(tmp_path: Path) -> None:
    for name, concurrency, speed in (("plain-c4", 4, 300.0), ("k3-c4", 4, 410.0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "profile_export_aiperf.json").write_text(json.dumps(aiperf(concurrency, speed)))
        (folder / "inputs.json").write_text('{"data": []}')
        (folder / "profile_export.jsonl").write_text('{"metrics": {}}\n')
        (folder / "raw_records").mkdir()
        (folder / "raw_records" / "raw_records_1.jsonl").write_text('{"metadata": {}}\n')
        (folder / "logs").mkdir()
        (folder / "logs" / "system.json").write_text("{}")
    found = read_benches([str(tmp_path)])
    assert [(r.batch, r.k, r.tokens_per_s, r.prompts) for r in found.runs] == [
        (4, 3, 410.0, 3.0), (4, 0, 300.0, 3.0),
    ]  # fmt: skip
    assert found.model == "org/target"
    left_out = [note for note in found.notes if "it lies with a result of AIPerf" in note]
    first = str(tmp_path / "k3-c4" / "logs" / "system.json")
    assert [note.split(": ")[0] for note in left_out] == [f"{first} and 1 more"]
    # vLLM tells acceptance per request if asked to, and AIPerf sums it up.
    told = aiperf(4, 410.0) | {
        "pooled_spec_decode_acceptance_histogram": {"0": 40, "1": 30, "2": 20, "3": 10},
        "spec_decode_overall_draft_acceptance_rate": {"unit": "%", "avg": 20.0},
    }
    (tmp_path / "told.json").write_text(json.dumps(told))
    (tmp_path / "bare.json").write_text(json.dumps({**told, list(told)[-1]: None}))
    runs = [read_benches([str(tmp_path / f"{n}.json")]).runs[0] for n in ("told", "bare")]
    assert [(run.k, run.round_tokens) for run in runs] == [(5, 2.0), (3, 2.0)]
    # A drafter of which nothing is accepted does not tell how many tokens it drafts.
    dead = told | {"pooled_spec_decode_acceptance_histogram": {"0": 100}, list(told)[-1]: None}
    (tmp_path / "dead.json").write_text(json.dumps(dead))
    with pytest.raises(DraftsimError, match=r"no draft length: write .*@K"):
        read_benches([str(tmp_path / "dead.json")])
    [run] = read_benches([f"{tmp_path}/dead.json@3"]).runs
    assert (run.k, run.round_tokens) == (3, 1.0)
    # Results of vLLM next to AIPerf's count, too.
    written(tmp_path / "plain-c4", {"k2-c1": served(1, 150.0, (0.5, 0.25))})
    assert [run.k for run in read_benches([str(tmp_path / "plain-c4")]).runs] == [2, 0]
    # With a request rate there is no concurrency: Little's law gives it.
    (tmp_path / "k3-c4" / "profile_export_aiperf.json").write_text(json.dumps(aiperf(None, 410.0)))
    assert read_benches([str(tmp_path / "k3-c4")]).runs[0].batch == 8


@pytest.mark.parametrize(
    ("server", "k"),
    [
        ({"speculative_algorithm": None}, 0),
        ({"speculative_algorithm": "EAGLE3", "speculative_num_steps": 3,
          "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}, 3),
        ({"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 9}, 8),
    ],
)  # fmt: skip
def test_sglangs_options_tell_draft_length_and_model(
    server: dict[str, Any], k: int, tmp_path: Path
) -> None:
    row = {**served(4, 300.0), "accept_length": 2.1 if k else None}
    del row["model_id"]
    row["server_info"] = {"model_path": "org/target", **server}
    (tmp_path / "run.jsonl").write_text(json.dumps(row) + "\n")
    found = read_benches([str(tmp_path / "run.jsonl")])
    assert (found.runs[0].k, found.model) == (k, "org/target")


def test_a_speculating_run_without_a_draft_length_is_no_run_without_speculation(
    tmp_path: Path,
) -> None:
    row = {**served(4, 300.0), "accept_length": 2.1}
    tree = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3,
            "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}  # fmt: skip
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DraftsimError, match=r"no draft length: write .*@K"):
        read_benches([str(path)])
    assert read_benches([f"{path}@3"]).runs[0].k == 3
    with pytest.raises(DraftsimError, match="@0: the run speculated"):
        read_benches([f"{path}@0"])
    for length in (1.0, 0.0):
        path.write_text(json.dumps({**row, "accept_length": length}) + "\n")
        [plain] = read_benches([str(path)]).runs
        assert (plain.k, plain.emitted) == (0, None)
    # vLLM takes a number of tokens that is left out from the drafter.
    mtp = {**served(4, 300.0), "speculative_config": {"method": "mtp"}}
    for changed in ({}, {"server_info": {"speculative_algorithm": "EAGLE3"}}):
        path.write_text(json.dumps(mtp | changed) + "\n")
        with pytest.raises(DraftsimError, match=r"no draft length: write .*@K"):
            read_benches([str(path)])
        assert read_benches([f"{path}@1"]).runs[0].k == 1
    path.write_text(json.dumps({**served(4, 300.0, (0.8,)), "speculative_config": {}}) + "\n")
    assert read_benches([str(path)]).runs[0].k == 1
    # No draft length makes a chain of a tree.
    path.write_text(json.dumps({**row, "server_info": tree}) + "\n")
    for text in (str(path), f"{path}@3"):
        with pytest.raises(DraftsimError, match=r"drafted trees \(speculative_eagle_topk 4\)"):
            read_benches([text])


@pytest.mark.parametrize("held", [0.3, 1.04, 11.5])
@pytest.mark.parametrize("cap", [None, 64])
def test_a_request_rate_leaves_littles_law(cap: int | None, held: float, tmp_path: Path) -> None:
    """Requests at once are their rate times their stay, and each keeps its measured speed."""
    row = {**served(64, 640.0), "max_concurrency": cap, "request_rate": 2.5}
    row["mean_tpot_ms"] = (held / 2.5 * 1e3 - 60.0) / 255
    path = tmp_path / "rate.json"
    path.write_text(json.dumps(row))
    found = read_benches([f"{path}@0"])
    batch = max(1, round(held))
    assert found.runs[0].batch == batch
    assert found.runs[0].tokens_per_s == pytest.approx(640.0 * batch / held)
    below = "" if cap is None else ", below its limit of 64"
    assert f"ran at {three_digits(held)} requests at once on average{below}" in found.notes[0]
    # Means of answers of several lengths do not tell the stay.
    for told in ({"mean_e2el_ms": 8000.0}, {"latencies": [4.0, 12.0] * 32}):
        path.write_text(json.dumps({**row, **told}))
        assert read_benches([f"{path}@0"]).runs[0].batch == 20
    # Without a rate the limit is reached, unless too few requests came.
    path.write_text(json.dumps({**row, "request_rate": "inf"}))
    assert read_benches([f"{path}@0"]).runs[0].batch == batch
    if cap is not None:
        # SGLang measures the mean itself; times alone do not tell it if requests come at a rate.
        path.write_text(json.dumps({**row, "concurrency": 60.9}))
        assert read_benches([f"{path}@0"]).runs[0].batch == 61
        path.write_text(json.dumps({**row, "request_rate": "inf", "concurrency": 60.9}))
        assert read_benches([f"{path}@0"]).runs[0].batch == 64
        del row["mean_ttft_ms"]
        path.write_text(json.dumps(row))
        with pytest.raises(DraftsimError, match="a fixed one and no request rate"):
            read_benches([f"{path}@0"])


def test_aiperf_at_a_request_rate_ran_at_its_mean_concurrency(tmp_path: Path) -> None:
    told = aiperf(64, 410.0)
    path = tmp_path / "aiperf.json"
    for phase in ({"rate": 4.1}, {}):
        told["input_config"]["phases"][1] |= phase
        path.write_text(json.dumps(told))
        assert read_benches([str(path)]).runs[0].batch == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "of no known format"),
        ("[]", "holds no runs"),
        ("not json", "is not JSON"),
        (json.dumps({**served(1, 10.0), "completed": 0}), "lacks or misstates"),
        (json.dumps({**served(1, 10.0), "output_throughput": -1}), "tokens_per_s is -1, expected"),
        (
            json.dumps({**served(1, 10.0), "max_concurrency": None, "concurrency": float("inf")}),
            "concurrency is inf, expected",
        ),
        (json.dumps({**served(1, 10.0), "mean_ttft_ms": float("nan")}), "ttft_s is nan, expected"),
        (json.dumps({**served(1, 10.0), "mean_ttft_ms": -60.0}), "ttft_s is -0.06, expected"),
        (json.dumps({**served(1, 10.0), "output_throughput": 1e300}), "tokens_per_s is 1e.300,"),
        (json.dumps({**served(1, 10.0), "model_id": ["a"]}), "model is .'a'., expected text"),
        (
            json.dumps({**served(1, 10.0), "spec_decode_num_drafts": 1e-300,
                        "spec_decode_draft_tokens": 1e300}),
            "lacks or misstates",
        ),
        ("[" * 100_000, "is not JSON"),
    ],
)  # fmt: skip
def test_files_of_no_use_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(DraftsimError, match=message):
        read_benches([str(path)])


def test_what_cannot_decide_says_what_would(tmp_path: Path, run: Run) -> None:
    folder = written(tmp_path / "results", {"plain": served(4, 200.0)})
    ran = run("recommend", "--bench", folder)
    assert "measure K = 3 at 4 requests" in ran.refusal
    near = {"plain": served(4, 200.0), "k1": served(4, 203.0, (0.5,))}
    close = run("recommend", "--bench", written(tmp_path / "near", near), "--batch", "4").ok()
    assert "these two runs would tell most: " in close.err
    two = written(tmp_path / "two", {"a": served(1, 9.0), "b": {**served(1, 9.0), "model_id": "x"}})
    mixed = run("recommend", "--bench", two)
    assert "give those of one server" in mixed.refusal


def test_a_bound_on_tpot_is_kept_or_refused(tmp_path: Path, run: Run) -> None:
    folder = written(tmp_path / "results", A100)
    run("recommend", "--bench", folder, "--batch", "1,8", "--slo", "tpot=20ms").ok()
    missed = run("recommend", "--bench", folder, "--batch", "32", "--slo", "tpot=2ms")
    assert "no draft length meets it at 32 requests" in missed.refusal
    asked = ("--batch", "1,32", "--method", "EAGLE3", "--draft", "org/head")
    some = run("recommend", "--bench", folder, *asked, "--slo", "tpot=12ms", "--json", "-").ok()
    assert [row["batch"] for row in some.rows] == [1]
    assert "no draft length meets it at 32 requests; the fastest, K = " in some.said
    assert '"method": "eagle3"' in some.document["launch"]  # the only spelling that vLLM reads
    late = run("recommend", "--bench", folder, "--slo", "ttft=1s,tpot=20ms")
    assert "do not tell TTFT" in late.refusal


@pytest.mark.parametrize("bound", [9, 11])
def test_a_bound_on_tpot_leaves_out_the_first_token(bound: int, tmp_path: Path, run: Run) -> None:
    """Requests wait 0.5 s for the first token and take 10 ms for each of 49 others."""
    row = {**served(1, 50 / 0.99), "total_output_tokens": 64 * 50, "mean_ttft_ms": 500.0,
           "mean_tpot_ms": 10.0, "request_throughput": 1 / 0.99}  # fmt: skip
    slower = {**row, "output_throughput": 40.0, "request_throughput": 0.8, "accept_length": 1.5}
    folder = written(tmp_path / "results", {"k0": row, "k1": slower})
    asked = ("recommend", "--bench", folder, "--batch", "1", "--slo", f"tpot={bound}ms")
    ran = run(*asked)
    assert ran.code == (2 if bound < 10 else 0), ran.err
    # Without TTFT the time includes that of the first token, which is no proof.
    csv = tmp_path / "runs.csv"
    csv.write_text("batch,k,tokens_per_s,emitted\n1,0,50.5,\n1,1,40,1.5\n")
    told = run("recommend", "--bench", csv, "--slo", f"tpot={bound}ms").ok()
    assert f"--slo tpot={bound}ms cannot be checked at 1 request" in " ".join(told.err.split())


def test_where_nothing_gains_no_speculation_is_recommended(tmp_path: Path, run: Run) -> None:
    poor = (0.2, 0.05, 0.01)
    folder = written(tmp_path / "results", {
        "plain-1": served(1, 100.0), "plain-16": served(16, 1200.0),
        "head-1": served(1, 70.0, poor), "head-16": served(16, 600.0, poor),
    })  # fmt: skip
    ran = run("recommend", "--bench", folder).ok()
    assert ran.err.splitlines()[-1] == "vllm serve org/target"
    assert any(": No speculation up to 16 requests" in line for line in ran.err.splitlines())


def test_an_engine_with_one_draft_length_says_which_it_gets(tmp_path: Path, run: Run) -> None:
    folder = written(tmp_path / "results", A100)
    ran = run("recommend", "--engine", "sglang", "--bench", folder, "--draft", "org/head").ok()
    assert (
        "sglang has one draft length for every load: the command sets that for 1 request" in ran.err
    )
    assert "has one draft length" not in run("recommend", "--bench", folder).err


def test_a_sweep_folder_counts_each_run_once(tmp_path: Path) -> None:
    """`vllm bench sweep` writes summaries, warm-ups and failures next to its runs."""
    folder = tmp_path / "BENCH--max_concurrency=1"
    folder.mkdir()
    config = json.dumps({"method": "eagle3", "num_speculative_tokens": 3})
    row = {**served(1, 120.0), "run_number": 0, "speculative-config": config}
    (folder / "run=0.json").write_text(json.dumps(row))
    (folder / "run=1.json").write_text(json.dumps({**row, "speculative-config": None}))
    (folder / "summary.json").write_text(json.dumps([row, row]))
    (folder / "warmup.json").write_text(json.dumps(row))
    (folder / "run=2.failure.json").write_text("{}")
    (tmp_path / "SERVE-default-failure.json").write_text("{}")
    assert [run.k for run in read_benches([str(tmp_path)]).runs] == [3, 0]
    (folder / "run=0.json").unlink()
    (folder / "run=1.json").unlink()
    assert [run.k for run in read_benches([str(tmp_path)]).runs] == [3, 3]


def test_tensorrt_llm_gets_one_line_whose_longest_draft_comes_first(
    tmp_path: Path, run: Run
) -> None:
    folder = written(tmp_path / "results", A100)
    asked = ("--engine", "tensorrt-llm", "--bench", folder, "--draft", "org/head")
    ran = run("recommend", *asked).ok()
    line = ran.err.splitlines()[-1]
    assert "#" not in line
    start, _, rest = line.partition(" <(echo ")
    assert start == "trtllm-serve org/target --extra_llm_api_options"
    config = json.loads(shlex.split(rest.removesuffix(")"))[0])["speculative_config"]
    assert config["speculative_model"] == "org/head"
    lengths = list(config["draft_len_schedule"].values())
    assert lengths[0] == config["max_draft_len"] == max(lengths)


def test_transformers_gets_a_line_of_python_that_compiles(tmp_path: Path, run: Run) -> None:
    folder = written(tmp_path / "results", {k: A100[k] for k in ("plain-1", "head-1")})
    ran = run("recommend", "--engine", "hf", "--bench", folder, "--draft", "org/head").ok()
    line = ran.err.splitlines()[-1]
    assert line.startswith("from transformers import AutoModelForCausalLM; TARGET = ")
    compile(line, "line", "exec")


def test_experts_of_the_target_can_be_told(tmp_path: Path, run: Run) -> None:
    folder = written(tmp_path / "results", {k: A100[k] for k in ("plain-1", "head-1")})
    assert run("recommend", "--bench", folder, "--experts", "128/4").code == 0
    for text in ("128", "4/128", "x/2"):
        ran = run("recommend", "--bench", folder, "--experts", text)
        assert ran.code == 2, ran.err
        assert "experts" in ran.err.splitlines()[-1]


def test_notes_on_a_file_are_said_once_and_only_where_they_hold(tmp_path: Path) -> None:
    """Counters tell the acceptance of a GuideLLM file, whose runs say none."""
    means = {"request_concurrency": 1.0, "output_tokens_per_second": 90.0,
             "prompt_token_count": 500, "output_token_count": 200}  # fmt: skip
    one = {"metrics": {name: {"successful": {"mean": mean}} for name, mean in means.items()}}
    for name in ("plain", "k3"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"benchmarks": [one, one]}))
    told = [str(tmp_path)]
    assert [note.rpartition(": ")[2] for note in read_benches(told).notes] == [
        f"K = 3 is read from its name; otherwise write {tmp_path}/k3.json@K",
        "it is estimated from the speeds",
        "does not mention speculation, so it is taken as a run without it (K = 0); otherwise "
        f"write {tmp_path}/plain.json@K",
    ]
    assert len(read_benches(told, acceptance_told=True).notes) == 2


def test_a_file_is_read_by_what_it_holds(tmp_path: Path) -> None:
    """Gzipped results, and rows of vLLM's names in JSON lines."""
    result = json.dumps(served(4, 300.0, ACCEPTED)).encode()
    (tmp_path / "head.json.gz").write_bytes(gzip.compress(result))
    for given in (tmp_path, tmp_path / "head.json.gz"):
        assert [run.k for run in read_benches([str(given)]).runs] == [5]
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        '{"max_concurrency": 1, "num_speculative_tokens": 3, "output_throughput": 60.0}\n'
    )
    assert [run.k for run in read_benches([str(rows)]).runs] == [3]


def test_a_file_that_is_given_twice_counts_once(tmp_path: Path) -> None:
    folder = written(tmp_path / "results", {"plain": served(4, 200.0), "k1": served(4, 203.0)})
    twice = read_benches([str(folder), f"{folder}/../results/k1.json"])
    assert twice.runs == read_benches([str(folder)]).runs
    assert twice.notes[-1].endswith("holds runs that were given before: each counts once")
    with pytest.raises(DraftsimError, match="is given twice, with different @K"):
        read_benches([str(folder), f"{folder}/plain.json@2"])


@pytest.mark.parametrize(
    "changed", [{"max_concurrency": "8"}, {"mean_ttft_ms": None}, {"request_throughput": None}]
)
def test_fields_that_are_text_or_empty_are_read(changed: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**served(8, 640.0), **changed}))
    [run] = read_benches([f"{path}@0"]).runs
    assert run.batch == 8
