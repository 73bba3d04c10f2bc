"""What the tests of the update rules share."""

from __future__ import annotations

import pytest

from ds_slide import _native

INSTRUCTION_SETS = ("portable", "avx2", "avx512")


@pytest.fixture(scope="session", params=INSTRUCTION_SETS)
def isa(request: pytest.FixtureRequest) -> str:
    available = INSTRUCTION_SETS[: INSTRUCTION_SETS.index(_native.isa()) + 1]
    if request.param not in available:
        pytest.skip(f"this processor has no {request.param}")
    return str(request.param)


@pytest.fixture(scope="session")
def workers() -> _native.Workers:
    return _native.Workers(2, [])
