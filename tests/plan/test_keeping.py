"""What blocks keep of what they save."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from keepable_blocks import keepables

from ds_slide.plan.keeping import Keepable, Kept, fillings, kept_within
from ds_slide.plan.mixtures import Mixture, Run, mixtures

GB = 10**9
# A block of a 3 B model, 8 x 2048 tokens: attention, products, and norms and activations, which never stay.
RUNS = [
    Run(("norm", 0), 0.02, 0),
    Run(("product", 0), 0.13, 150 * 10**6),
    Run(("attention", 0), 0.12, 68 * 10**6),
    Run(("product", 1), 0.63, 720 * 10**6),
    Run(("activation", 0), 0.10, 0),
]
WHOLE = 1_435 * 10**6
ACTIVATIONS = [Keepable(order, WHOLE, 0.0033, mixtures(RUNS, WHOLE)) for order in range(1, 37)]


def test_attention_stays_first_and_then_all_products() -> None:
    attention, products = mixtures(RUNS, WHOLE)
    assert attention == Mixture(frozenset({("attention", 0)}), 68 * 10**6, 0.12)
    assert products.results == {("attention", 0), ("product", 0), ("product", 1)}
    assert products.nbytes == 938 * 10**6 and abs(products.share - 0.88) < 1e-9


def test_what_brings_less_than_the_whole_block_is_no_mixture() -> None:
    assert len(mixtures(RUNS, 1_050 * 10**6)) == 1  # all of it for 112 MB more than the products
    assert len(mixtures(RUNS, 600 * 10**6)) == 1 and mixtures(RUNS, 500 * 10**6) == ()
    assert mixtures([Run(("norm", 0), 1.0, 0)], WHOLE) == mixtures([], WHOLE) == ()


def test_of_equal_blocks_the_last_are_kept() -> None:
    whole = [Keepable(each.order, each.nbytes, each.seconds) for each in ACTIVATIONS]
    assert kept_within(4.5 * GB, whole) == Kept(frozenset((34, 35, 36)))
    assert kept_within(4.5 * GB, whole, first=True) == Kept(frozenset((1, 2, 3)))


def test_mixtures_fill_the_room_before_whole_blocks_do() -> None:
    found = kept_within(10 * GB, ACTIVATIONS)
    assert found.whole == {36} and found.mixed.keys() == set(range(1, 36))
    assert [order for order, mixture in found.mixed.items() if mixture.share > 0.5] == [35, 34, 33, 32, 31, 30, 29]
    assert kept_within(40 * GB, ACTIVATIONS).whole >= {35, 36}
    assert kept_within(36 * WHOLE, ACTIVATIONS) == Kept(frozenset(range(1, 37)))


def test_mixtures_have_to_save_more_than_they_take() -> None:
    """Attention alone saves 0.4 ms of a block, all products 2.9."""
    slower = [replace(each, mixing_s=0.0005) for each in ACTIVATIONS]
    found = kept_within(10 * GB, slower)
    assert found.mixed and all(mixture.share > 0.5 for mixture in found.mixed.values())
    saved = 0.0033 * len(found.whole) + (0.88 * 0.0033 - 0.0005) * len(found.mixed)
    assert abs(found.seconds(slower) - saved) < 1e-9
    faster = [replace(each, mixing_s=0.00039) for each in ACTIVATIONS]  # attention alone hardly makes up for it
    assert kept_within(10 * GB, faster).mixed.keys() == found.mixed.keys()
    slow = [replace(each, mixing_s=0.003) for each in ACTIVATIONS]
    assert kept_within(10 * GB, slow) == kept_within(10 * GB, [replace(each, mixtures=()) for each in slow])


@given(st.integers(-5, 300), st.integers(0, 30), keepables)
def test_more_room_saves_no_less_and_mixtures_save_no_less_than_whole_blocks(
    room: int, more: int, blocks: list[Keepable]
) -> None:
    kept = kept_within(room, blocks)
    assert kept.nbytes(blocks) <= max(room, 0) and not kept.whole & kept.mixed.keys()
    without = [Keepable(each.order, each.nbytes, each.seconds) for each in blocks]
    least = kept_within(room, without)
    assert not least.mixed
    slack = 1e-9
    assert kept.seconds(blocks) >= least.seconds(blocks) - slack
    assert kept_within(room + more, blocks).seconds(blocks) >= kept.seconds(blocks) - slack


@given(st.integers(1, 10**9), st.integers(1, 64))
def test_one_of_several_calls_has_its_bytes(nbytes: int, calls: int) -> None:
    """And no result of it is computed again for the lack of one."""
    of_all = Mixture(frozenset(), nbytes, 0.5).times(calls)
    assert nbytes <= of_all.times(1 / calls).nbytes <= nbytes + 1


@given(st.integers(0, 120), keepables)
def test_no_room_is_left_for_another_block(room: int, blocks: list[Keepable]) -> None:
    kept = kept_within(room, blocks)
    left = room - kept.nbytes(blocks)
    taken = {order: mixture.nbytes for order, mixture in kept.mixed.items()}
    for each in blocks:
        assert each.order in kept.whole or each.order in taken or each.nbytes > left


@given(keepables)
def test_fillings_are_what_room_of_their_bytes_is_filled_with(blocks: list[Keepable]) -> None:
    for each in fillings(blocks):
        assert kept_within(each.nbytes, blocks).seconds(blocks) >= each.seconds - 1e-9
        assert each.whole + each.mixed <= len(blocks)
