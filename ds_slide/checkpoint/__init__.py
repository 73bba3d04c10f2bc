"""Checkpoints in DeepSpeed's own formats.

Files are read by torch: `torch.load` with `weights_only`, `mmap` and `safe_globals` (`restricted`). torch lacks five
things, which are written here:

* Write a file whose tensors are not in memory (`archive`). `torch.save` needs every tensor. `archive` makes the bytes
  of each tensor in pieces when its record is written. It sums them on the way, for the zip archive's CRC32 and for the
  manifest. `torch.serialization.skip_data` leaves the bytes of fake tensors out, but its file has CRC32 0 for them. Its
  size is not known before it is on the disk, and it can have no mark that DS-Slide wrote it.
* Sum the parts of a file in several threads (`sums`), which needs the CRC-32 of bytes that follow each other.
* Give back the pages of a mapped file after their read (`restricted`), because they count as memory of the process.
* Read numpy arrays from a restricted pickle (`numpy_values`). `safe_globals` would have to allow numpy's own functions,
  which also make arrays of objects and types of overlapping fields.
* List the names in a pickle that torch refuses (`restricted`), for our own message. torch's message advises to load the
  file without restriction.
"""
