"""Encoder-decoder pairs: passes, recordings equal to decoding, training, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, M2M100Config, M2M100ForConditionalGeneration

from commands.common.progress import progress_bar
from policies import parse_policy
from profiler.checks.differences import output_of
from profiler.checks.spot_check import PlannedPolicy, assisted_generation
from profiler.latency.passes import fitting_grid
from profiler.latency.table import Grid
from profiler.models.loading import load_pair
from profiler.models.runner import Runner
from profiler.models.seq2seq import Seq2SeqRunner, check_same_start, decoder_prefix, make_runner
from profiler.profile import Settings, profile_latency, profile_trace
from profiler.prompts import Prompt
from profiler.recording.trace import Recorder
from tests import seq2seq_pair as bundled
from tests.few_cells import few_cells
from tests.outputs import greedy
from tests.replayed import assert_decoded_as_replayed
from tests.seq2seq import (
    GAMMA,
    KINDS,
    NEW,
    POSITIONS,
    VOCABULARY,
    build,
    models,
    pair,
    recorded,
    source,
)
from traces.acceptance.sampling import Sampling
from traces.errors import DraftsimError
from traces.replay.run import replay


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal but for float32's rounding, on the scale of the logits."""
    scale = float(expected.abs().max())
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_equal_the_models_own_whatever_the_slots_held(kind: str) -> None:
    """Whole, token by token, and after another source and rejected tokens."""
    model = models(kind)[0]
    runner = Seq2SeqRunner(model, 200)
    for seed in (1, 2):
        text = source(9 + seed, seed)
        tokens = torch.cat([runner.begin(text), source(14, seed + 10)])
        with torch.inference_mode():
            expected = model(input_ids=text[None], decoder_input_ids=tokens[None]).logits[0]
        assert_close(runner.forward(tokens, 0), expected)
        steps = [runner.forward(tokens[i : i + 1], i, keep=1) for i in range(15)]
        assert_close(torch.cat(steps), expected)
        runner.forward(source(6), 5)  # rejected: written over by the next pass
        assert_close(runner.forward(tokens[5:], 5, keep=3), expected[-3:])


@pytest.mark.parametrize("kind", KINDS)
def test_branches_of_a_tree_equal_sequences_of_their_own(kind: str) -> None:
    model = models(kind)[0]
    runner, text = Seq2SeqRunner(model, 200), source()
    path = torch.cat([runner.begin(text), source(14, 3)])
    runner.forward(path, 0)
    count, cuts, tails = path.shape[0], (9, 4), source(6, 4).reshape(2, 3)
    sees = torch.arange(count)[None] < torch.tensor(cuts)[:, None]
    for step in range(3):
        mask = torch.cat([sees, *[torch.eye(2, dtype=torch.bool)] * (step + 1)], dim=1)
        logits = runner.forward(
            tails[:, step], count + 2 * step, mask=mask, positions=torch.tensor(cuts) + step
        )
        for branch, cut in enumerate(cuts):
            alone = torch.cat([path[:cut], tails[branch, : step + 1]])
            with torch.inference_mode():
                expected = model(input_ids=text[None], decoder_input_ids=alone[None]).logits[0, -1]
            assert_close(logits[branch], expected)
    # The same pass with the slots as positions is another one: the positions did reach it.
    slots = runner.forward(tails[:, 2], count + 4, mask=mask)
    assert float((slots - logits).abs().max()) > 1e-2


def test_the_forced_first_token_and_banned_ids_are_as_in_generate() -> None:
    model = build("bart", 2)
    plain = greedy(Seq2SeqRunner(model, 64), source(), NEW, frozenset())
    model.generation_config.forced_bos_token_id = 5
    model.generation_config.bad_words_ids = [[plain[0]], [plain[1], plain[2]]]
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = None
    runner = Seq2SeqRunner(model, 64)
    assert runner.prefix.tolist() == [2, 5]
    model.generation_config.bad_words_ids = [[plain[0]]]
    expected = model.generate(input_ids=source()[None], max_new_tokens=NEW + 1, do_sample=False)
    mine = greedy(Seq2SeqRunner(model, 64), source(), NEW, frozenset())
    assert expected[0].tolist() == [2, 5, *mine]
    assert plain[0] not in mine


def test_the_latency_table_prices_the_encoder_with_the_prefill(tmp_path: Path) -> None:
    both = pair("bart")
    grid = Grid(widths=(1, 5, 9), contexts=(16, 64, 900), prompts=(8, 32, 900), repeats=3)
    with progress_bar() as progress, few_cells():
        table = profile_latency(both, Settings(NEW, GAMMA, grid=grid), tmp_path, progress)
    cells = table.cells
    prefill = cells[cells["phase"] == "prefill"]
    assert sorted(set(prefill["new_tokens"])) == [8, 32, 64]  # the last positions
    assert set(cells[cells["phase"] == "forward"]["context"]) == {16, 64, 78}
    assert set(cells["phase"]) >= {"prefill", "forward", "catch_up", "signal", "host_round"}
    assert (cells["median_s"] >= 0).all()


POLICIES = {
    "t5": ("fixed:gamma=1", "fixed:gamma=8", "hf-heuristic", "gammatune-plus", "adaedl", "oracle"),
}
"""Policies tried on one kind only: lengths do not depend on the kind, requests to models do."""


@pytest.mark.invariant(8)
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_outputs_are_those_of_generate(kind: str) -> None:
    trace, target = recorded(kind), models(kind)[0]
    for i, request in enumerate(trace.requests):
        prompt = torch.tensor(request.prompt_ids)
        out = target.generate(input_ids=prompt[None], max_new_tokens=NEW, do_sample=False)[0]
        assert output_of(trace, i) == out[1:].tolist()
        assert output_of(trace, i) == greedy(make_runner(target, 64), prompt, NEW, pair(kind).eos)


@pytest.mark.parametrize("kind", KINDS)
def test_recorded_tails_are_what_the_draft_says_on_its_own(kind: str) -> None:
    """Each tail, drafted one token a pass from the mismatch, without a tree."""
    trace, draft = recorded(kind), Seq2SeqRunner(models(kind)[1], POSITIONS)
    columns = {name: np.asarray(values) for name, values in trace.columns.items()}
    tails = 0
    for i, request in enumerate(trace.requests):
        output = output_of(trace, i)
        prefix = draft.begin(torch.tensor(request.prompt_ids)).tolist()
        mine = columns["request"] == i
        for at in range(len(output)):
            rows = np.flatnonzero(mine & (columns["position"] == at))
            drafted = columns["draft_token"][rows].tolist()
            tails += len(drafted) > 1
            known = [*prefix, *output[:at]]
            for offset, token in enumerate(drafted):
                fed = torch.tensor([*known, *drafted[:offset]])
                assert int(draft.forward(fed, 0, keep=1).argmax()) == token
    assert tails > 0


@pytest.mark.invariant(1)
@pytest.mark.parametrize("kind", KINDS)
def test_real_rounds_equal_replay_for_every_policy(kind: str) -> None:
    trace = recorded(kind)
    assert 0 < (trace.run_lengths > 0).mean() < 1  # the pair both agrees and disagrees
    texts = ("fixed:gamma=4", "svip", *POLICIES.get(kind, ()))
    planned = [PlannedPolicy(text, parse_policy(text, max_gamma=GAMMA)) for text in texts]
    assert_decoded_as_replayed(pair(kind), trace, planned)


def test_transformers_assisted_generation_writes_the_recorded_output() -> None:
    """Its target passes are not compared: in transformers 5.23 the draft of an encoder-decoder
    loses a token of its cache after a round, and proposes other tokens than the draft model does.
    """
    trace = recorded("bart")
    settings = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant",
                "assistant_confidence_threshold": 0.0}  # fmt: skip
    for i, request in enumerate(trace.requests):
        prompt = torch.tensor(request.prompt_ids)
        output, passes = assisted_generation(pair("bart"), prompt, NEW, **settings)
        assert output == output_of(trace, i)
        assert NEW / 5 <= passes <= NEW


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.0, 0.9)])
def test_sampled_recordings_run(sampling: Sampling) -> None:
    trace = recorded("t5", sampling)
    assert trace.sampling == sampling
    log = replay(trace, parse_policy("fixed:gamma=3", max_gamma=GAMMA))
    assert log.rounds["emitted"].sum() == trace.tokens - len(trace.requests)


NOUNS = ["path", "mode", "name", "file", "size", "key", "value", "line", "code", "index"]


def test_a_small_trained_pair_is_loaded_and_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training of `tests.seq2seq_pair`, in miniature: it learns, and it round-trips."""
    shape = bundled.Shape((1, 2), (1, 1), width=32, feed_forward=48, heads=2, vocabulary=300)
    some = [
        (f"def set_{a}_{b}({a}, {b}={i}, force)", f"given {a} , {b} or {i} , force : set {a} {b}")
        for i, a in enumerate(NOUNS)
        for b in NOUNS
    ]
    monkeypatch.setattr(bundled, "load_examples", lambda: some)
    plans = [bundled.TrainingPlan(25, 256, seed, muon_rate=0.02, adam_rate=0.01) for seed in (1, 2)]
    losses = bundled.make_pair(tmp_path, shape, draft=plans[0], target=plans[1], prompts=4)
    assert losses[1] < losses[0] < np.log(300)
    loaded = load_pair(tmp_path / "target", tmp_path / "draft")
    assert loaded.meta["target"]["layers"] == 2
    assert loaded.meta["target"]["encoder_layers"] == 1
    lines = (tmp_path / "prompts.jsonl").read_text().splitlines()
    ids = loaded.encode(json.loads(lines[0])["prompt"])
    target, draft = make_runner(loaded.target, 900), make_runner(loaded.draft, 900)
    columns = Recorder(target, draft, max_new_tokens=12, max_gamma=4, eos=loaded.eos).record(ids)
    output = columns["token"][columns["offset"] == 0].tolist()
    wanted = loaded.target.generate(input_ids=ids[None], max_new_tokens=12, do_sample=False)
    assert output == wanted[0, 1:].tolist()


def test_signatures_are_said_in_words_with_their_arguments_first() -> None:
    import ast

    node = ast.parse("def makeDirs(self, path, *, mode_bits=438): pass").body[0]
    assert isinstance(node, ast.FunctionDef)
    assert bundled.describe(node) == "given path , mode bits or 438 : make dirs"


def test_growing_changes_no_output() -> None:
    shape = bundled.Shape(width=32, feed_forward=48, heads=2, vocabulary=300)
    small = bundled.build_model(shape, (1, 1)).eval()
    large = bundled.grow(small, shape, (2, 3)).eval()
    ids = source()[None]
    with torch.inference_mode():
        mine, theirs = (m(input_ids=ids, decoder_input_ids=ids).logits for m in (small, large))
    np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_pairs_of_two_kinds_are_refused(tmp_path: Path) -> None:
    shape = bundled.Shape((1, 1), (1, 1), width=16, feed_forward=16, heads=2, vocabulary=300)
    tokenizer = bundled.train_tokenizer([("def f(a)", "given a : f")], shape)
    models("bart")[1].save_pretrained(tmp_path / "both")
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16,
                         num_hidden_layers=1, num_attention_heads=2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "causal")
    for name in ("both", "causal"):
        tokenizer.save_pretrained(tmp_path / name)
    for names in (("both", "causal"), ("causal", "both")):
        refused = pytest.raises(
            DraftsimError, match=r"^.*both is an encoder-decoder model and .*causal is not: .*$"
        )
        with refused as caught:
            load_pair(*(tmp_path / name for name in names))
        assert "\n" not in str(caught.value)


def test_what_cannot_be_run_is_refused_in_one_line() -> None:
    bart = models("bart")[0]
    with pytest.raises(DraftsimError, match="is an encoder-decoder model"):
        Runner(bart, 64)
    runner = Seq2SeqRunner(bart, 40)
    with pytest.raises(DraftsimError, match="no source is encoded"):
        runner.forward(source(), 0)
    with pytest.raises(DraftsimError, match="one request at a time"):
        runner.forward_batch(source()[None], source()[None], 8)
    with pytest.raises(DraftsimError, match=r"a source text of 65 .* the encoder's 64 positions"):
        runner.check_room(65, 8)
    with pytest.raises(DraftsimError, match=r"64 new tokens exceed .* of which 63 are free"):
        runner.check_room(8, 64)
    with pytest.raises(DraftsimError, match="room for 39"):
        runner.check_room(8, 40)
    runner.begin(source())
    with pytest.raises(DraftsimError, match="41 tokens do not fit"):
        runner.forward(source(41), 0)
    with pytest.raises(DraftsimError, match="use batch 1"):
        fitting_grid(Grid(batches=(1, 4)), 40, seq2seq=True)
    with pytest.raises(DraftsimError, match="no room for a context of 32"):
        fitting_grid(Grid(), 40, seq2seq=True)
    config = M2M100Config(vocab_size=60, d_model=16, encoder_layers=1, decoder_layers=1,
                          encoder_attention_heads=2, decoder_attention_heads=2)  # fmt: skip
    with pytest.raises(DraftsimError, match="M2M100Decoder takes no positions"):
        Seq2SeqRunner(M2M100ForConditionalGeneration(config), 40)


def test_decoders_must_start_alike() -> None:
    mine, other = build("bart", 1), build("bart", 1)
    check_same_start(mine, other)
    other.generation_config.forced_bos_token_id = 7
    with pytest.raises(DraftsimError, match=r"starts with the tokens \[2\] .* \[2, 7\]"):
        check_same_start(mine, other)
    other.generation_config.decoder_start_token_id = None
    other.config.decoder_start_token_id = other.generation_config.bos_token_id = None
    with pytest.raises(DraftsimError, match="names no decoder_start_token_id"):
        decoder_prefix(other)


def test_sources_that_do_not_fit_are_named(tmp_path: Path) -> None:
    prompts = [Prompt("long", "all", "a" * 70)]
    with progress_bar() as progress, pytest.raises(DraftsimError, match="prompt 'long': a source"):
        profile_trace(pair("bart"), prompts, Settings(NEW, GAMMA), tmp_path, progress)
