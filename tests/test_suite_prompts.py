"""The texts that the suite's pair is trained on and recorded over: quick, and held apart."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.training.pair import DocumentBatches
from profiler.train import documents as text
from profiler.train.documents import CATEGORIES, Document, Known
from profiler.train.minutes import held_out_prompts, sample_tokenizer

LINES = [f"value_{i} = {'+'.join(str(i * k % 97) for k in range(1, 12))}" for i in range(400)]


def documents(first: int, count: int) -> list[Document]:
    """Documents of 16 lines of their own, of two categories in turn."""
    return [
        Document(CATEGORIES[i % 2], f"file{i}.py", "\n".join(LINES[i * 16 : i * 16 + 16]))
        for i in range(first, first + count)
    ]


def test_documents_are_in_one_line_each_with_an_end() -> None:
    train = documents(0, 10)
    tokenizer = sample_tokenizer(train, quick=True)
    stream = DocumentBatches(train, tokenizer)
    wanted = sorted(tokenizer(d.text)["input_ids"] + [tokenizer.eos_token_id] for d in train)
    bounds = [*stream.starts.tolist(), len(stream.ids)]
    assert sorted(stream.ids[a:b].tolist() for a, b in pairwise(bounds)) == wanted


def test_only_documents_whose_turn_comes_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    cut: list[str] = []
    real = text.cut_prompt

    def counted(document: str, encode: object) -> str | None:
        cut.append(document)
        return real(document, encode)  # type: ignore[arg-type]

    monkeypatch.setattr(text, "cut_prompt", counted)
    train, held_out = documents(0, 6), documents(6, 19)
    tokenizer = sample_tokenizer(train, quick=True)
    prompts = held_out_prompts(train, held_out, tokenizer, 4)
    assert len(prompts) == len(cut) == 4
    assert sorted(p.category for p in prompts) == sorted([*CATEGORIES[:2]] * 2)
    assert len({p.id for p in prompts}) == 4
    everything = held_out_prompts(train, held_out, tokenizer, 1000)
    assert [p.text for p in everything[:4]] == [p.text for p in prompts]
    assert len({p.text for p in everything}) == len(everything) > 4


def test_prompts_do_not_occur_in_training_and_not_twice() -> None:
    train, held_out = documents(0, 6), documents(6, 4)
    twins = [Document(d.category, "twin.py", d.text) for d in held_out]
    # The beginning of a held-out document stands within a training document, between others.
    known = "\n".join(["first = 1", *held_out[0].text.split("\n")[:12], "last = 2"])
    train.append(Document("function", "other.py", known))
    tokenizer = sample_tokenizer(train, quick=True)
    cuttable = held_out_prompts(documents(0, 6), held_out, tokenizer, 100)
    assert any(p.text in known for p in cuttable)
    prompts = held_out_prompts(train, [*held_out, *twins], tokenizer, 100)
    assert {p.text for p in prompts} == {p.text for p in cuttable if p.text not in known}
    assert len(prompts) == len(cuttable) - 1


SHORT = st.text("ab\n", max_size=12)


@given(texts=st.lists(SHORT, max_size=4), asked=SHORT)
def test_what_is_known_is_what_a_search_finds(texts: list[str], asked: str) -> None:
    train = [Document("function", "", text) for text in texts]
    known = asked in Known(train)
    assert known == (asked in "\0".join(texts))
