"""Tile sizes of `symmetric_product`, which need no Triton. They are chosen by shape alone, so a run has the same bits
again, wherever its states are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """A tile of the result is `rows` x `columns`, and its sums take `depth` numbers at a time. `group`: larger sides of
    tiles in a square of neighbours, which run together and share what they read. All are powers of two. `described`:
    tiles are read by descriptors (Hopper's copy engine), for which a row has a multiple of 16 bytes."""

    rows: int = 128
    columns: int = 256
    depth: int = 64
    group: int = 1
    warps: int = 8
    stages: int = 3
    described: bool = False

    @property
    def side(self) -> int:
        """Rows of a square of neighbours."""
        return max(self.rows, self.columns) * self.group

    def programs(self, size: int) -> int:
        """Return the programs of one matrix with `size` rows: all tiles of the squares of the lower triangle."""
        squares = -(-size // self.side)
        return squares * (squares + 1) // 2 * (self.side // self.rows) * (self.side // self.columns)


TILES = {
    1024: Tiles(128, 128, 64, group=2, warps=4, stages=3, described=True),
    256: Tiles(64, 64, 64, warps=4, stages=4),
}
"""For matrices whose result has at least so many rows, the largest number first. On an H200 the first make 919 and 1103
TFLOP/s, counted as whole products, in the two large cases of `benchmarks/symmetric_products.py`. 128 x 256 without
descriptors makes 736 and 883, and torch 555 and 788."""
CAPABILITIES = (9,)
"""Major compute capabilities whose GPUs have the shared memory and the products that `TILES` is for (Hopper)."""
MULTIPLE = 16
"""Both sides of a matrix are multiples of it, so that every row begins at an address that is read at once."""


def tiles_of(size: int) -> Tiles:
    """Return the tiles of a result with `size` rows."""
    return next(tiles for least, tiles in TILES.items() if size >= least)


def has_tiles(short: int, long: int) -> bool:
    """Whether the products of a matrix with these sides gain from `symmetric_product`."""
    return short >= min(TILES) and short % MULTIPLE == 0 and long % MULTIPLE == 0
