"""The rows that benchmarks/token_eviction/quality.py gives both sides to read."""

from __future__ import annotations

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.token_eviction.data import recall_rows, text_rows
from pigou.models import bundled_path

TEXT = "\n".join(
    f"The {i} ships that sail to the east shall not return this year." for i in range(300)
)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(bundled_path() / "tokenizer.json"))


def test_questions_are_equally_long_and_their_answers_were_told(tokenizer: Tokenizer) -> None:
    found = recall_rows(tokenizer, TEXT, pairs=(1, 4), distances=(32, 128), count=3, context=400)
    assert found.tokens.shape == (12, 403)
    assert found.pairs.tolist() == [1] * 6 + [4] * 6
    assert found.distance.tolist() == [32] * 3 + [128] * 3 + [32] * 3 + [128] * 3
    for ids in found.tokens.tolist():
        mark, key, answer = (tokenizer.decode([token]) for token in ids[-3:])
        told = tokenizer.decode(ids[:-3])
        assert mark == "@"
        assert f"@{key}{answer}\n" in told


def test_a_context_too_short_for_its_pairs_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="context must have as many"):
        recall_rows(tokenizer, TEXT, pairs=(8,), distances=(64,), count=1, context=100)


def test_shifted_rows_begin_later_and_those_behind_the_text_are_left_out(
    tokenizer: Tokenizer,
) -> None:
    texts = (TEXT, TEXT[9:8000])
    ids = [tokenizer.encode(text).ids for text in texts]
    strides = [len(ids[0]) // 3, len(ids[1])]
    rows = text_rows(tokenizer, texts, 4, strides[0], 0.5)
    starts = [(0, strides[0] // 2), (0, int(1.5 * strides[0])), (1, strides[1] // 2)]
    expected = [ids[text][at : at + strides[0] - 1] for text, at in starts]
    assert rows[:, 1:].tolist() == [row for row in expected if len(row) == strides[0] - 1]
    with pytest.raises(ValueError, match=r"shift is 1; .* below 1"):
        text_rows(tokenizer, texts, 4, 65, 1)


def test_rows_of_text_begin_anew_and_share_nothing(tokenizer: Tokenizer) -> None:
    rows = text_rows(tokenizer, (TEXT, TEXT[9:8000]), 4, 65)
    assert rows.shape == (4, 65)
    assert (rows[:, 0] == tokenizer.token_to_id("<|begin|>")).all()
    assert len({tuple(row) for row in rows[:, 1:].tolist()}) == 4
    with pytest.raises(ValueError, match="do not fit"):
        text_rows(tokenizer, (TEXT, TEXT), 400, 2048)
    assert np.array_equal(rows, text_rows(tokenizer, (TEXT, TEXT[9:8000]), 4, 65))
