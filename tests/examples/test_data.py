"""Batches depend on their position alone, cover the text, and keep ranks and the held-out part apart."""

from __future__ import annotations

import pytest
import torch
from finetune_data import DOCUMENT_END, RandomTokens, Shape, TextWindows, encode_bytes, load_batches


def text_windows(num_windows: int, shape: Shape, seed: int = 0) -> TextWindows:
    """Window i holds the numbers i * seq ... so that its first token tells which one it is."""
    return TextWindows(torch.arange(num_windows * shape.seq), shape, seed)


def rows(batches: TextWindows, positions: range, seq: int) -> list[int]:
    return [int(row[0]) // seq for position in positions for row in batches.train(position)]


def test_an_epoch_shows_each_training_window_once_and_the_next_reorders() -> None:
    seq = 4
    batches = text_windows(40, Shape(batch=2, seq=seq))  # 38 for training, 2 held out
    first, second = rows(batches, range(19), seq), rows(batches, range(19, 38), seq)
    assert sorted(first) == sorted(second) == list(range(38))
    assert first != second
    assert {int(row[0]) // seq for position in range(5) for row in batches.held_out(position)} == {38, 39}


def test_a_batch_is_a_function_of_its_position() -> None:
    shape = Shape(batch=3, seq=4)
    forward, backward = text_windows(20, shape), text_windows(20, shape)
    # 7 spans the end of an epoch (19 training windows, three a batch).
    wanted = [forward.train(position) for position in range(8)]
    for position in reversed(range(8)):
        assert torch.equal(backward.train(position), wanted[position])


def test_ranks_split_what_one_rank_would_take() -> None:
    whole = text_windows(40, Shape(batch=4, seq=4)).train(3)
    parts = [text_windows(40, Shape(batch=2, seq=4, rank=rank, world_size=2)).train(3) for rank in range(2)]
    assert torch.equal(torch.cat(parts), whole)


def test_seeds_reorder() -> None:
    shape = Shape(batch=8, seq=4)
    assert not torch.equal(text_windows(40, shape, seed=0).train(0), text_windows(40, shape, seed=1).train(0))


def test_random_tokens_differ_by_seed_position_rank_and_part() -> None:
    def batches(seed: int = 0, rank: int = 0) -> RandomTokens:
        return RandomTokens(1000, Shape(batch=2, seq=16, rank=rank, world_size=2), seed)

    assert torch.equal(batches().train(5), batches().train(5))
    # A seed above 32 bits must count too: torch's generator alone would drop its upper half.
    draws = [
        batches().train(5),
        batches().train(6),
        batches(1).train(5),
        batches(1 << 40).train(5),
        batches(rank=1).train(5),
    ]
    draws.append(batches().held_out(5))
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == len(draws)
    assert all(0 <= int(draw.min()) and int(draw.max()) < 1000 for draw in draws)


def test_default_text_is_the_library_and_bytes_are_tokens(tmp_path) -> None:
    options = {"vocabulary": 264, "encode": encode_bytes, "document_end": DOCUMENT_END, "seed": 0}
    batch = load_batches(None, Shape(batch=4, seq=128), **options).train(0)
    assert batch.shape == (4, 128) and batch.dtype == torch.int64
    assert int(batch.max()) <= DOCUMENT_END

    text = tmp_path / "text.txt"
    text.write_text("grüße " * 100, encoding="utf-8")
    row = load_batches(str(text), Shape(batch=1, seq=64), **options).train(0)[0]
    assert "grüße" in bytes(row.tolist()).decode("utf-8", errors="ignore")


def test_text_that_does_not_fit_is_refused(tmp_path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("too short")
    options = {"encode": encode_bytes, "document_end": DOCUMENT_END, "seed": 0}
    with pytest.raises(ValueError, match=r"10 tokens, so 2 windows of --seq 4.*smaller --batch or --seq"):
        load_batches(str(text), Shape(batch=2, seq=4), vocabulary=264, **options)
    with pytest.raises(ValueError, match="vocabulary of 100"):
        load_batches(str(text), Shape(batch=1, seq=4), vocabulary=100, **options)
