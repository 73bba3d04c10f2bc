"""What several ranks of one host get, each alone and all at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

Rate = Annotated[float, Field(gt=0)]
SHARES_BELOW = 0.85
"""Two ranks share a link if one of them keeps less than this part of its rate beside the other. On one link each keeps
0.5. The distance from 1 is for the noise of a measurement."""


class Figures(BaseModel):
    """A part of a file of ceilings."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class RankRates(Figures):
    """What one rank of a host gets, in 10^9 bytes or 10^12 FLOP a second. None: not measured, with a GPU or without."""

    h2d_gb_s: Rate | None = None
    d2h_gb_s: Rate | None = None
    both_ways_gb_s: Rate | None = None
    copy_gb_s: Rate | None = None
    """Copies within host memory, read and written."""
    product_tflop_s: Rate | None = None
    """Products of the processor."""
    update_gb_s: Rate
    disks_gb_s: Mapping[str, Rate] = {}
    """Reads and writes together, by the path of the disk."""

    def named(self) -> dict[str, float]:
        """Return the rates that were measured, by the name of their field or the path of their disk."""
        fields = self.model_dump(exclude={"disks_gb_s"}, exclude_none=True)
        return {**fields, **self.disks_gb_s}


class PairOfRanks(Figures):
    """`kept`: the rate of copies of two ranks that copy at once, as a part of their rate alone, for the slower one."""

    ranks: tuple[int, int]
    kept: float = Field(gt=0, le=1)


class RanksCeilings(Figures):
    """What each rank of a host gets, by rank: `alone`, while the others rest, and `together`, while all do the same.
    `places`: GPU and cores of each, as text. `pairs`: all of them."""

    alone: tuple[RankRates, ...] = Field(min_length=2)
    together: tuple[RankRates, ...]
    places: tuple[str, ...]
    pairs: tuple[PairOfRanks, ...]

    @model_validator(mode="after")
    def _of_the_same_ranks(self) -> RanksCeilings:
        ranks = range(self.ranks)
        if {len(self.together), len(self.places)} != {self.ranks}:
            raise ValueError("alone, together and places have different numbers of ranks")
        if len({frozenset(each.named()) for each in (*self.alone, *self.together)}) > 1:
            raise ValueError("the ranks have different lanes")
        if any(each.ranks[0] not in ranks or each.ranks[1] not in ranks for each in self.pairs):
            raise ValueError("a pair has a rank that is not there")
        return self

    @property
    def ranks(self) -> int:
        return len(self.alone)

    @property
    def least(self) -> RankRates:
        """What the slowest rank gets while all work. A step ends when the slowest rank does."""
        first, named = self.together[0], [each.named() for each in self.together]
        found = {name: min(each[name] for each in named) for name in first.named()}
        disks = {path: found.pop(path) for path in first.disks_gb_s}
        return RankRates(disks_gb_s=disks, **found)

    def that_share(self) -> list[list[int]]:
        """Return the groups of ranks that slow each other's copies, directly or by a third rank."""
        group_of = {rank: [rank] for rank in range(self.ranks)}
        for each in self.pairs:
            one, other = (group_of[rank] for rank in each.ranks)
            if each.kept < SHARES_BELOW and one is not other:
                one.extend(other)
                group_of.update(dict.fromkeys(other, one))
        return sorted(sorted(group) for rank, group in group_of.items() if rank == min(group) and len(group) > 1)
