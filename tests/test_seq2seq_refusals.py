"""Encoder-decoder pairs that cannot be run are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, M2M100Config, M2M100ForConditionalGeneration

from commands.common.progress import progress_bar
from profiler.latency.seq2seq import fitting_grid
from profiler.latency.table import Grid
from profiler.models.loading import load_pair
from profiler.models.runner import Runner
from profiler.models.seq2seq import Seq2SeqRunner, check_same_start, decoder_prefix
from profiler.profile import Settings, profile_trace
from profiler.prompts import Prompt
from tests import seq2seq_pair as bundled
from tests.seq2seq import GAMMA, NEW, VOCABULARY, build, models, pair, source
from traces.errors import DraftsimError


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
        fitting_grid(Grid(batches=(1, 4)), runner)
    with pytest.raises(DraftsimError, match="no room for a context of 32"):
        fitting_grid(Grid(), runner)
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
