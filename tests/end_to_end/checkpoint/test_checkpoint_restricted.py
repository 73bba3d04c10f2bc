"""What a checkpoint's files may hold: nothing in them is run, whatever the manifest says, and the rest still loads."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import enum
import math
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hostile_pickles as hostile
import numpy as np
import pytest
import torch
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from harness import Result, batches, differences, ds_config, engine_for, llama, states_of, train
from torch.serialization import get_safe_globals, safe_globals
from universal import UNIVERSAL, convert

from ds_slide.checkpoint.archive import Archive
from ds_slide.checkpoint.manifest import NAME as MANIFEST
from ds_slide.checkpoint.manifest import Manifest
from ds_slide.checkpoint.restricted import load, refused_names
from ds_slide.checkpoint.sums import sum_of_file
from ds_slide.errors import SlideError
from ds_slide.integration.checkpoint_load import _zero_to_fp32

pytestmark = pytest.mark.usefixtures("one_rank")

MODEL = "zero_pp_rank_0_mp_rank_00_model_states.pt"
OPTIMIZER = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
PARAMETER = "zero/model.layers.0.mlp.up_proj.weight"
UNIVERSAL_FILES = [MODEL, "zero/optimizer_state.pt", *(f"{PARAMETER}/{key}.pt" for key in ("fp32", "exp_avg_sq"))]


@dataclasses.dataclass
class Mine:
    number: int


@dataclasses.dataclass
class Other(Mine):
    pass


class Colour(enum.Enum):
    RED = "red"


class Module:
    """Pickled, it is the name of this module's `MODULE`."""

    def __reduce__(self) -> str:
        return "MODULE"


MODULE = Module()


def small_engine(**others: Any) -> Any:
    return engine_for(llama(num_hidden_layers=1), ds_config({"window": 2}, **others))


@pytest.fixture(scope="module")
def engine(one_rank) -> Iterator[Any]:  # noqa: ARG001
    with small_engine() as engine:
        train(engine, batches(1))
        yield engine


@pytest.fixture(scope="module")
def universal_engine(one_rank) -> Iterator[Any]:  # noqa: ARG001
    with small_engine(checkpoint=UNIVERSAL) as engine:
        yield engine


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory) -> Path:
    """A folder with a checkpoint, and a universal one that was made from it."""
    folder = tmp_path_factory.mktemp("saved")
    engine.save_checkpoint(folder, "tag")
    convert(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def put_right(path: Path) -> None:
    """Make the manifest agree with the file, as whoever has written the file can."""
    manifest = Manifest.read(path.parent)
    assert manifest is not None
    files = {**manifest.files, path.name: sum_of_file(path)}
    (path.parent / MANIFEST).unlink()
    Manifest(files, manifest.saved_at).write(path.parent)


def check_refused(engine: Any, path: Path, marker: Path, names: str, folder: Path, **arguments: Any) -> None:
    """Loading stops with one sentence, nothing has run or changed; and it would have run."""
    before = Result(states=states_of(engine.module))
    with pytest.raises(SlideError, match=names) as caught:
        engine.load_checkpoint(folder, **arguments)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert not marker.exists()
    assert differences(Result(states=states_of(engine.module)), before) == []
    torch.load(path, weights_only=False)
    assert marker.exists()


@pytest.mark.parametrize("manifest", ["right", "none"])
@pytest.mark.parametrize("file", [MODEL, OPTIMIZER])
@pytest.mark.parametrize("name", hostile.VALUES)
def test_nothing_in_a_file_is_run(name, file, manifest, engine, folder, tmp_path):
    value, refused = hostile.VALUES[name]
    path, marker = folder / "tag" / file, tmp_path / "marker"
    hostile.put(path, value(marker))
    if manifest == "right":
        put_right(path)
    else:
        (folder / "tag" / MANIFEST).unlink()
    check_refused(engine, path, marker, rf"holds .*{refused}.*add_safe_globals", folder)


def test_nothing_in_a_file_of_the_old_format_is_run(engine, folder, tmp_path):
    path, marker = folder / "tag" / MODEL, tmp_path / "marker"
    hostile.put(path, hostile.touching(marker), _use_new_zipfile_serialization=False)
    put_right(path)
    check_refused(engine, path, marker, r"holds posix\.system", folder)


def test_nothing_in_the_place_of_a_storage_is_run(engine, folder, tmp_path):
    path, marker = folder / "tag" / OPTIMIZER, tmp_path / "marker"
    hostile.put_into_storage(path, marker)
    put_right(path)
    with pytest.raises(SlideError, match=rf"{OPTIMIZER} holds posix\.system"):
        engine.load_checkpoint(folder)
    with pytest.raises(AttributeError):  # what `touch` returns is no kind of storage
        torch.load(path, weights_only=False)
    assert marker.exists()
    marker.unlink()
    with pytest.raises(SlideError):
        load(str(path))
    assert not marker.exists()


def test_other_pickle_protocols_run_nothing(engine, folder, tmp_path):
    path, marker = folder / "tag" / MODEL, tmp_path / "marker"
    hostile.put_in_protocol_4(path, marker)
    put_right(path)
    check_refused(engine, path, marker, r"holds the pickle operation FRAME", folder)


def test_the_files_of_all_ranks_for_weights_alone(engine, folder, tmp_path):
    """DeepSpeed's zero_to_fp32 reads them, which in stock is a torch.load of its own."""
    path, marker = folder / "tag" / OPTIMIZER, tmp_path / "marker"
    hostile.put(path, hostile.touching(marker))
    put_right(path)

    def never(**_: Any) -> None:
        raise AssertionError

    arguments = {"load_optimizer_states": False, "custom_load_fn": never}
    check_refused(engine, path, marker, r"holds posix\.system", folder, **arguments)


@pytest.mark.parametrize("file", UNIVERSAL_FILES)
def test_nothing_in_a_universal_checkpoint_is_run(file, universal_engine, folder, tmp_path):
    path, marker = folder / "tag_universal" / file, tmp_path / "marker"
    if file.startswith(PARAMETER):
        torch.save({"param": hostile.touching(marker)}, path)
    else:
        hostile.put(path, hostile.touching(marker))
    check_refused(universal_engine, path, marker, r"holds posix\.system", folder)


def test_a_second_file_of_the_model_is_no_way_in(engine, folder, tmp_path):
    """DeepSpeed merges what matches its pattern."""
    path, marker = folder / "tag" / MODEL.replace("00_model", "01_model"), tmp_path / "marker"
    shutil.copy(folder / "tag" / MODEL, path)
    hostile.put(path, hostile.touching(marker))
    with pytest.raises(SlideError, match=rf"{path.name} is not in {MANIFEST}"):
        engine.load_checkpoint(folder)
    put_right(path)
    check_refused(engine, path, marker, r"holds posix\.system", folder)


def test_a_file_that_changes_after_the_check_is_refused_by_the_load_itself(engine, folder, tmp_path, monkeypatch):
    path, marker = folder / "tag" / OPTIMIZER, tmp_path / "marker"
    original = type(engine)._load_zero_checkpoint

    def swapping(self: Any, *args: Any, **kwargs: Any) -> Any:
        hostile.put(path, hostile.touching(marker))
        return original(self, *args, **kwargs)

    monkeypatch.setattr(type(engine), "_load_zero_checkpoint", swapping)
    with pytest.raises(SlideError, match=rf"{OPTIMIZER} holds posix\.system"):
        engine.load_checkpoint(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("array", "refused"),
    [
        (np.array([{}], dtype=object), r"numpy\.dtype of 'O8'"),
        (np.zeros(1, dtype=[("a", "i4"), ("b", "f8")]), r"numpy\.dtype of 'V12'"),
        (np.ma.array([1.0]), r"numpy\.ma"),
        (np.random.default_rng(0), r"numpy\.random"),
    ],
)
def test_numpy_makes_no_objects(array, refused, engine, folder):
    path = folder / "tag" / MODEL
    hostile.put(path, array)
    put_right(path)
    with pytest.raises(SlideError, match=rf"{MODEL} holds .*{refused}"):
        engine.load_checkpoint(folder)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_member_of_an_enum_is_its_name_in_some_pythons(zipped, tmp_path):
    """Python 3.11.0 to 3.11.3 pickle it so, and stock's checkpoints hold the stage. Here it is so on any Python."""
    member = hostile.Calling(getattr, ZeroStageEnum, "weights")
    torch.save({"stage": member}, tmp_path / "file", _use_new_zipfile_serialization=zipped)
    assert load(str(tmp_path / "file"))["stage"] is ZeroStageEnum.weights
    assert refused_names(Archive({"stage": member}).pickled) == []


def test_an_enum_of_the_user_is_refused_by_its_name_until_the_user_allows_it(tmp_path):
    torch.save({"colour": hostile.Calling(getattr, Colour, "RED")}, tmp_path / "file")
    with pytest.raises(SlideError, match=rf"holds {Colour.__module__}\.Colour, but only"):
        load(str(tmp_path / "file"))
    with safe_globals([Colour]):
        assert load(str(tmp_path / "file"))["colour"] is Colour.RED


MEMBER = hostile.Calling(getattr, ZeroStageEnum, "weights")
ATTRIBUTES: dict[str, tuple[Any, ...]] = {
    "of a module": (MODULE, "exp"),
    "of an allowed class": (LossScaler, "backward"),
    "of a text": ("text", "format"),
    "of a tensor": (torch.ones(1), "weights"),
    "of a member": (MEMBER, "value"),
    "a member of a member": (MEMBER, "weights"),
    "mro": (ZeroStageEnum, "mro"),
    "__init_subclass__": (ZeroStageEnum, "__init_subclass__"),
    "__members__": (ZeroStageEnum, "__members__"),
    "_member_map_": (ZeroStageEnum, "_member_map_"),
    "a method": (ZeroStageEnum, "from_bytes"),
    "a name that is no text": (ZeroStageEnum, ["weights"]),
    "no name": (ZeroStageEnum,),
    "a default": (ZeroStageEnum, "weights", LossScaler),
    "a default that would be taken": (ZeroStageEnum, "no member", LossScaler),
}


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_no_other_attribute_is_given(name, tmp_path):
    value = hostile.Calling(getattr, *ATTRIBUTES[name])
    torch.save({"value": value}, tmp_path / "file")
    with safe_globals([(math, f"{__name__}.MODULE")]):
        with pytest.raises(SlideError, match=r"file holds builtins\.getattr, but only tensors .*add_safe_globals"):
            load(str(tmp_path / "file"))
        assert refused_names(Archive({"value": value}).pickled) == ["builtins.getattr"]


def test_a_class_of_the_user_is_refused_until_the_user_allows_it(engine, tmp_path):
    engine.save_checkpoint(tmp_path, "tag", client_state={"mine": Mine(7)})
    name = rf"{Mine.__module__}.{Mine.__qualname__}"
    with pytest.raises(SlideError, match=rf"{MODEL} holds {name}, but only .*add_safe_globals\(\[\.\.\.\]\)"):
        engine.load_checkpoint(tmp_path)
    with safe_globals([Mine]):
        assert engine.load_checkpoint(tmp_path)[1]["mine"] == Mine(7)


def test_what_will_be_refused_is_said_once_when_it_is_saved(engine, tmp_path, caplog):
    engine.save_checkpoint(tmp_path, "plain", client_state=client_state())
    with safe_globals([Other]):
        engine.save_checkpoint(tmp_path, "allowed", client_state={"other": Other(1)})
    assert [record for record in caplog.records if "refuses" in record.getMessage()] == []
    for tag in ("one", "two"):
        engine.save_checkpoint(tmp_path, tag, client_state={"other": Other(1)})
    engine.save_checkpoint(tmp_path, "number", client_state={"large": 1 << 5000})
    sentence, other = [record.getMessage() for record in caplog.records if "refuses" in record.getMessage()]
    assert f"{tmp_path / 'number'} holds the pickle operation LONG4 " in other
    assert f"{tmp_path / 'one'} holds {Other.__module__}.{Other.__qualname__} out of client_state" in sentence


def test_what_the_user_allows_elsewhere_stays_as_it_is(engine, folder):
    before = set(get_safe_globals())
    with safe_globals([LossScaler, np.dtype]):
        engine.load_checkpoint(folder)
        assert {LossScaler, np.dtype} <= set(get_safe_globals())
    engine.load_checkpoint(folder)
    assert set(get_safe_globals()) == before


def client_state() -> dict[str, Any]:
    """What scripts save: generators' states, arguments, numbers of numpy, containers."""
    generator = np.random.RandomState(5)
    return {
        "python": random.Random(3).getstate(),
        "numpy": generator.get_state(),
        "torch": torch.Generator().manual_seed(4).get_state(),
        "arguments": argparse.Namespace(lr=1e-3, betas=(0.9, 0.95), name="run"),
        "best": np.float64(1.5),
        "seen": np.int64(2**40),
        "flag": np.bool_(True),
        "table": np.arange(6, dtype=">i2").reshape(2, 3).T,
        "order": collections.OrderedDict(b=1, a=[None, (1, 2.5), b"bytes", 1 + 2j, {3, 4}]),
        "device": torch.device("cpu"),
        "dtype": torch.bfloat16,
        "shape": torch.Size([2, 3]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }


@pytest.mark.parametrize("writer", ["ours", "stock", "stock, old format"])
def test_what_scripts_save_comes_back(writer, engine, tmp_path):
    state = client_state()
    if writer == "ours":
        engine.save_checkpoint(tmp_path, "tag", client_state=state)
    else:
        config = ds_config(None, checkpoint={"checkpoint_serialization": writer == "stock"})
        with engine_for(llama(num_hidden_layers=1), config) as stock:
            train(stock, batches(1))
            stock.save_checkpoint(tmp_path, "tag", client_state=state)
    loaded = engine.load_checkpoint(tmp_path)[1]
    np.testing.assert_equal(loaded["numpy"], state["numpy"])
    np.testing.assert_array_equal(loaded["table"], state["table"])
    assert type(loaded["table"]) is np.ndarray and type(loaded["numpy"][1]) is np.ndarray
    assert all(type(loaded[name]) is type(state[name]) for name in ("best", "seen", "flag"))
    assert torch.equal(loaded["torch"], state["torch"]) and torch.equal(loaded["parameter"], state["parameter"])
    for name in ("python", "arguments", "best", "seen", "flag", "order", "device", "dtype", "shape"):
        assert loaded[name] == state[name], name
    np.random.RandomState().set_state(loaded["numpy"])


NUMPYS: dict[str, Any] = {
    "text": np.str_("ab"),
    "no text": np.str_(""),
    "texts": np.array(["a", "bcd"]),
    "bytes": np.array([b"x", b"yz"]),
    "date": np.datetime64("2020-01-01"),
    "dates": np.array(["2020-01-01T01", "NaT"], dtype=">M8[25s]"),
    "time": np.timedelta64(4, "h"),
    "empty": np.zeros((0, 3), dtype="f4"),
    "empty bytes": b"",
    "dtype": np.dtype(">i2"),
    "dtype of dates": np.dtype("m8[ns]"),
    "dtype of text": np.dtype("U3"),
    "nested": {np.dtype("f4"): [(np.arange(3), {np.dtype("i8")})], "n": argparse.Namespace(a=np.ones(2))},
}


def check_numpys(loaded: dict[str, Any]) -> None:
    assert "ds_slide" not in "".join(str(type(item)) for item in loaded.values())
    # Numpy itself brings arrays into this machine's byte order.
    for name, value in pickle.loads(pickle.dumps(NUMPYS, protocol=2)).items():
        assert type(loaded[name]) is type(value), name
        if name != "nested":
            np.testing.assert_array_equal(loaded[name], value, err_msg=name)
            assert getattr(loaded[name], "dtype", None) == getattr(value, "dtype", None), name
    (((array, dtypes),),) = [value for key, value in loaded["nested"].items() if key == np.dtype("f4")]
    assert type(array) is np.ndarray and dtypes == {np.dtype("i8")}
    assert type(loaded["nested"]["n"].a) is np.ndarray


def test_numpys_texts_dates_types_and_empty_arrays_come_back_as_numpys(engine, tmp_path, caplog):
    engine.save_checkpoint(tmp_path, "tag", client_state=NUMPYS)
    assert [record for record in caplog.records if "refuses" in record.getMessage()] == []
    check_numpys(engine.load_checkpoint(tmp_path)[1])
    check_numpys(load(str(tmp_path / "tag" / MODEL)))  # without a reading, which copies


@pytest.mark.parametrize(
    "allowed",
    [
        [np._core.multiarray.scalar],
        [np.dtype],
        [np._core.multiarray._reconstruct, np.ndarray, np.dtype, np.dtypes.UInt32DType],
    ],
)
def test_a_part_of_numpy_that_the_user_allows_takes_nothing_away(allowed, tmp_path):
    torch.save({**client_state(), **NUMPYS}, tmp_path / "file")
    before = set(get_safe_globals())
    with safe_globals(allowed):
        loaded = load(str(tmp_path / "file"))
        assert set(get_safe_globals()) == before | set(allowed)
    check_numpys(loaded)
    np.random.RandomState().set_state(loaded["numpy"])


def test_objects_load_with_all_of_numpy_that_they_need(tmp_path):
    torch.save({"objects": np.array([{}, None]), "seen": np.int64(3)}, tmp_path / "file")
    needed = [np._core.multiarray._reconstruct, np._core.multiarray.scalar, np.ndarray, np.dtype]
    with safe_globals([*needed, np.dtypes.ObjectDType, np.dtypes.Int64DType]):
        assert load(str(tmp_path / "file"))["objects"].tolist() == [{}, None]


@pytest.mark.parametrize("value", [np.array([{}]), np.zeros(1, dtype=[("a", "i4")])])
def test_what_is_refused_for_its_value_is_said_when_it_is_saved(value):
    state = {"weight": torch.ones(3), "large": torch.nn.Parameter(torch.ones(2, 2)), "value": value}
    (name,) = refused_names(Archive(state).pickled)
    assert "numpy.dtype of" in name


def test_options_of_another_deepspeed_change_nothing(tmp_path):
    torch.save({"a": 1}, tmp_path / "file")
    read = _zero_to_fp32().torch.load
    assert read(str(tmp_path / "file"), map_location="cpu", pickle_module=None, weights_only=False) == {"a": 1}
