import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_slide.config import format_bytes, parse_bytes
from ds_slide.errors import SlideConfigError


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (0, 0),
        (24_000_000_000, 24_000_000_000),
        (24e9, 24_000_000_000),
        ("24000000000", 24_000_000_000),
        ("24GiB", 24 * 2**30),
        ("24 GiB", 24 * 2**30),
        (" 24gib ", 24 * 2**30),
        ("64GB", 64 * 10**9),
        ("1.5MiB", 3 * 2**19),
        ("0.1GB", 10**8),
        ("7B", 7),
        ("3KB", 3000),
        ("3KiB", 3072),
        ("2TiB", 2 * 2**40),
    ],
)
def test_what_people_write(text, number):
    assert parse_bytes(text) == number


@pytest.mark.parametrize(
    "value",
    [
        -1,
        "-1GiB",
        "-5",
        1.5,
        float("nan"),
        float("inf"),
        True,
        None,
        [],
        {},
        "",
        "GiB",
        "1,5GiB",
        "1e9",
        "1.5",
        "24 GiB free",
    ],
)
def test_garbage_is_refused_by_name(value):
    with pytest.raises(SlideConfigError, match=r"^ds_slide\.gpu_memory is .*expected a size such as"):
        parse_bytes(value, "ds_slide.gpu_memory")


def test_the_ambiguous_unit_is_refused_with_both_readings():
    with pytest.raises(SlideConfigError, match=r"write 24GiB .* or 24GB"):
        parse_bytes("24G")


def test_an_unknown_unit_is_named():
    with pytest.raises(SlideConfigError, match="unknown unit 'GiBit'"):
        parse_bytes("24GiBit")


def test_sizes_stay_below_the_native_integer():
    assert parse_bytes(2**63 - 1) == 2**63 - 1
    with pytest.raises(SlideConfigError, match="more than 8 EiB"):
        parse_bytes(2**63)


@given(st.integers(0, 2**33 - 1), st.sampled_from([("KiB", 2**10), ("MB", 10**6), ("GiB", 2**30)]))
def test_whole_numbers_of_a_unit_are_exact(count, unit):
    name, factor = unit
    assert parse_bytes(f"{count}{name}") == count * factor


@given(st.integers(0, 2**62))
def test_bytes_as_text_are_exact(number):
    # Above 2^53 a float on the way would lose the low bits.
    assert parse_bytes(str(number)) == number
    assert parse_bytes(f"{number}B") == number


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (24 * 2**30, "24.0 GiB"), (3 * 2**50, "3072.0 TiB")],
)
def test_format(number, text):
    assert format_bytes(number) == text
