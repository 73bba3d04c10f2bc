"""Checkpoints in DeepSpeed's own formats.

Files are read by torch: `torch.load` with `weights_only`, `mmap` and `safe_globals` (`restricted`). What torch lacks,
and is written here:

* writing a file whose tensors are not in memory. `torch.save` needs every tensor; `archive` makes the bytes of each
  tensor in pieces when its record is written, and sums them on the way, for the zip archive's CRC32 and for the
  manifest. `torch.serialization.skip_data` leaves the bytes out as well, but its file keeps the wrong CRC32.
* giving back the pages of a mapped file that have been read (`restricted`): they count as memory of the process.
* arrays of numpy out of a restricted pickle (`numpy_values`): numpy's own functions, which `safe_globals` would have to
  allow, also make arrays of objects and types of overlapping fields.
* the names of everything that a pickle holds and torch refuses (`restricted`), for one sentence instead of torch's,
  which advises to load the file without restriction.
"""
