"""C++ core (csrc/).

Every pointer is an address as an int; arrays hold ``numel`` elements and need element alignment only. Long calls
release the GIL. ValueError for an argument outside its range.
"""

from ds_slide._native.kernels import (
    SLICE_LOG_BYTES,
    UPDATE_SLICE,
    SplitMasters,
    UpdateCall,
    Workers,
    accumulate,
    copy,
    first_wrong_page,
    isa,
    join,
    page_sums,
    split,
    sum_isa,
    sum_of_squares,
    update,
)
from ds_slide._native.memory import Generations, Lease, Pool, Slab
from ds_slide._native.transfers import IoEngine, Turns

__all__ = [
    "SLICE_LOG_BYTES",
    "UPDATE_SLICE",
    "Generations",
    "IoEngine",
    "Lease",
    "Pool",
    "Slab",
    "SplitMasters",
    "Turns",
    "UpdateCall",
    "Workers",
    "accumulate",
    "copy",
    "first_wrong_page",
    "isa",
    "join",
    "page_sums",
    "split",
    "sum_isa",
    "sum_of_squares",
    "update",
]
