"""The files of a checkpoint, without an engine: torch.save's format, sums of pieces, maps that give pages back."""

from __future__ import annotations

import dataclasses
import resource
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_slide.checkpoint import archive as pickle_writer
from ds_slide.checkpoint.archive import Archive, Planned, materialized
from ds_slide.checkpoint.restricted import MappedFiles
from ds_slide.checkpoint.state_buffers import joined
from ds_slide.checkpoint.sums import Sum, sum_of, sum_of_file, total
from ds_slide.errors import SlideError
from ds_slide.optim.reference import decode_split, encode_split


@dataclasses.dataclass
class Client:
    weight: torch.Tensor


def planned(tensor: torch.Tensor) -> Planned:
    return Planned(tensor.numel(), tensor.dtype, lambda start, stop: tensor[start:stop])


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_writer, "PIECE", 1000)


def content() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A value with planned and other tensors, and what the planned ones hold."""
    generator = torch.Generator().manual_seed(0)
    flats = {
        "fp32": torch.randn(40_001, generator=generator),
        "bf16": torch.randn(70_003, generator=generator).bfloat16(),
        "fp16": torch.randn(7, generator=generator).half(),
        "empty": torch.empty(0),
    }
    base = torch.arange(24.0)
    value = {
        "planned": {name: planned(flat) for name, flat in flats.items()},
        "shared": [base, base.view(4, 6)[1:3].t()],
        "parameter": torch.nn.Parameter(torch.ones(3, 2)),
        "numbers": [torch.tensor(7), torch.tensor([True, False]), torch.arange(5, dtype=torch.int16)],
        "client": Client(torch.full((2, 2), 0.5)),
        "plain": ("text", 1.5, None),
    }
    return value, flats


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("arguments", [{}, {"mmap": True}], ids=["read", "mapped"])
def test_torch_loads_what_was_planned(arguments, tmp_path):
    value, flats = content()
    Archive(value).write(tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", weights_only=False, **arguments)
    for name, flat in flats.items():
        assert loaded["planned"][name].dtype == flat.dtype and torch.equal(loaded["planned"][name], flat)
    assert torch.equal(loaded["shared"][1], value["shared"][1])
    loaded["shared"][0][:] = -1
    assert (loaded["shared"][1] == -1).all(), "two views of one storage became two storages"
    assert isinstance(loaded["parameter"], torch.nn.Parameter) and torch.equal(loaded["parameter"], torch.ones(3, 2))
    assert [tensor.tolist() for tensor in loaded["numbers"]] == [7, [True, False], [0, 1, 2, 3, 4]]
    assert torch.equal(loaded["client"].weight, value["client"].weight) and loaded["plain"] == value["plain"]


def test_safe_loading_works_for_tensors(tmp_path):
    Archive({"a": planned(torch.arange(5.0)), "b": [torch.ones(2)]}).write(tmp_path / "file.pt")
    loaded = torch.load(tmp_path / "file.pt", weights_only=True)
    assert loaded["a"].tolist() == [0, 1, 2, 3, 4] and loaded["b"][0].tolist() == [1, 1]


@pytest.mark.usefixtures("small_pieces")
def test_sizes_and_sums_are_those_of_the_file(tmp_path):
    path = tmp_path / "file.pt"
    archive = Archive(content()[0])
    found = archive.write(path)
    data = path.read_bytes()
    assert found == Sum(len(data), zlib.crc32(data)) == sum_of_file(path)
    assert archive.nbytes == len(data)
    with zipfile.ZipFile(path) as file:
        assert file.testzip() is None, "a record's CRC-32 is wrong"
        assert all(info.compress_type == zipfile.ZIP_STORED for info in file.infolist())


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (1, 1, 1), (3, 70_000, 257)])
def test_sums_add_up(lengths):
    generator = torch.Generator().manual_seed(1)
    parts = [bytes(torch.randint(0, 256, (n,), generator=generator, dtype=torch.uint8).tolist()) for n in lengths]
    assert total(map(sum_of, parts)) == sum_of(b"".join(parts))


def test_materialized_is_what_was_planned():
    value, flats = content()
    tensors = materialized({"a": [value["planned"]], "b": 1})
    assert tensors["b"] == 1
    assert all(torch.equal(tensors["a"][0][name], flat) for name, flat in flats.items())


def test_state_buffers_are_joined_as_the_reference_does_it():
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for shift in (0, 1, 12_345, 1 << 15):
        expected = decode_split(every, every.roll(shift))
        assert torch.equal(
            joined(every.view(torch.bfloat16), every.roll(shift)).view(torch.int32), expected.view(torch.int32)
        )


def test_every_master_is_joined_from_its_state_buffers():
    uppers = torch.tensor([0x0000, 0x0080, 0x3F80, 0x3F81, 0x7F7F, 0x8000, 0xBF80, 0xBF81, 0xFF7F])
    bits = ((uppers << 16)[:, None] + torch.arange(1 << 16)).flatten()
    masters = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int()
    high, low = encode_split(masters.view(torch.float32))
    assert torch.equal(joined(high.view(torch.bfloat16), low).view(torch.int32), masters)


def test_a_failure_names_file_and_bytes(tmp_path):
    with pytest.raises(SlideError, match=r"no_folder/file.pt failed after 0 of [\d,]+ bytes \(No such file"):
        Archive({"a": torch.ones(1)}).write(tmp_path / "no_folder" / "file.pt")


def test_a_fault_while_a_piece_is_made_is_the_callers(tmp_path):
    def read(start: int, _stop: int) -> torch.Tensor:
        raise RuntimeError(f"no elements from {start} on")

    with pytest.raises(RuntimeError, match="no elements from 0 on"):
        Archive({"a": Planned(10, torch.float32, read)}).write(tmp_path / "file.pt")


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def test_pages_of_a_mapped_file_are_given_back(tmp_path):
    size = 16 << 20
    torch.save({"a": torch.ones(size // 4), "b": torch.ones(size // 4)}, tmp_path / "file.pt")
    files = MappedFiles()
    loaded = files.load(str(tmp_path / "file.pt"), "cpu")
    before = resident_bytes()
    for tensor in loaded.values():
        with files.using(tensor) as used:
            assert used.sum() == size // 4
    assert resident_bytes() - before < size // 4
    assert loaded["a"][-1] == 1, "the map is still there"


def test_memory_that_is_no_map_is_left_alone(tmp_path):
    torch.save({"a": torch.ones(1 << 16)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    files = MappedFiles()
    loaded = files.load(str(tmp_path / "old.pt"), "cpu")["a"]
    with files.using(loaded) as used:
        assert used.sum() == 1 << 16
    assert (loaded == 1).all()


@pytest.mark.slow
def test_archives_beyond_four_gibibytes(tmp_path):
    numel = (1 << 30) + 5  # of fp32: a record, and the offset of the next one, beyond 32 bits
    large = Planned(numel, torch.float32, lambda start, stop: (torch.arange(start, stop) % 1021).float())
    archive = Archive({"large": large, "next": planned(torch.arange(9.0))})
    archive.write(tmp_path / "file.pt")
    assert (tmp_path / "file.pt").stat().st_size == archive.nbytes > 1 << 32
    loaded = torch.load(tmp_path / "file.pt", mmap=True)
    assert loaded["next"].tolist() == list(range(9))
    assert loaded["large"].numel() == numel and loaded["large"][-1] == (numel - 1) % 1021
    with zipfile.ZipFile(tmp_path / "file.pt") as file:
        assert file.testzip() is None
