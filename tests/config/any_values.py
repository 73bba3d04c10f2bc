"""Values for every key of the "ds_slide" block, right and wrong, by its schema."""

from __future__ import annotations

import typing
from typing import Any

from hypothesis import strategies as st
from pydantic import BaseModel

from ds_slide.config import DebugConfig, SlideConfig

EXTREMES = [
    *(None, True, False, 0, 1, 2, 3, -1, 2**31, 2**63 - 1, 2**63, 10**20, -(10**20), 10**5000),
    *(0.0, -0.0, 0.5, 2.0, 1e-300, 1e300, float("inf"), float("-inf"), float("nan")),
    *(
        "",
        " ",
        "auto",
        "none",
        "off",
        "0",
        "1GiB",
        "24G",
        "1.5 TB",
        "-1B",
        "9" * 5000,
        "1" + "0" * 40 + "TiB",
        "\u0663GB",
    ),
    *("\0", "a\nb", "\ud800", "~", "~nosuchuser/x", "$HOME/x", "$NO_SUCH_VARIABLE", "${", "file:///x", "x" * 10**5),
    *([], [[]], [None], [0], [0, 0], [10**20], ["auto"], ["a"] * 100, list(range(2000)), {}, {"a": {}}, ()),
]
_scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters(exclude_categories=())), st.binary()
)
anything = st.one_of(
    st.sampled_from(EXTREMES),
    st.recursive(_scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_scalars, inner, max_size=3)),
)


def named_values(annotation: Any) -> list[Any]:
    """What the literals of a type name, at any depth."""
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [value for inner in typing.get_args(annotation) for value in named_values(inner)]


def _values(model: type[BaseModel], key: str) -> st.SearchStrategy[Any]:
    named = named_values(model.model_fields[key].annotation)
    own = st.sampled_from(named) | st.lists(st.sampled_from(named), max_size=3) if named else st.nothing()
    if model is SlideConfig and key == "debug":
        own = _blocks(DebugConfig)
    return own | anything | st.lists(st.integers() | st.text(), max_size=3)


def _blocks(model: type[BaseModel]) -> st.SearchStrategy[dict[Any, Any]]:
    """One to three keys of the schema, at times beside one that is not there."""
    keys = st.lists(st.sampled_from(sorted(model.model_fields)), min_size=1, max_size=3, unique=True)
    known = keys.flatmap(lambda names: st.fixed_dictionaries({name: _values(model, name) for name in names}))
    unknown = st.just({}) | st.dictionaries(_scalars, anything, max_size=1)
    return st.builds(lambda ours, theirs: {**theirs, **ours}, known, unknown)


enabled_blocks = _blocks(SlideConfig).map(lambda block: {**block, "enabled": True})
blocks = enabled_blocks | _blocks(SlideConfig) | anything
