"""Whatever lies in the place of a manifest, of `latest` or of a file: a load, or one sentence that names it."""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import Result, batches, differences, ds_config, engine_for, llama, states_of, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from universal import UNIVERSAL, convert

from ds_slide.checkpoint.manifest import NAME as MANIFEST
from ds_slide.checkpoint.manifest import Manifest
from ds_slide.errors import SlideError

pytestmark = pytest.mark.usefixtures("one_rank")

MODEL = "zero_pp_rank_0_mp_rank_00_model_states.pt"
OPTIMIZER = "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
SECONDS = 2.0
"""In which every load of this small model ends, whatever it meets."""


@pytest.fixture(scope="module")
def engine(one_rank) -> Iterator[Any]:  # noqa: ARG001
    with engine_for(llama(num_hidden_layers=1), ds_config({"window": 2})) as engine:
        train(engine, batches(1))
        yield engine


@pytest.fixture(scope="module")
def saved(engine, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    engine.save_checkpoint(folder, "tag")
    engine.load_checkpoint(folder)  # what a first load starts for good
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    shutil.copytree(saved, tmp_path / "run")
    return tmp_path / "run"


def refusal(engine: Any, folder: Path) -> str:
    """The sentence that a load ends with; empty where it loads. It takes no long, and leaves nothing open."""
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    begin = time.monotonic()
    sentence = ""
    try:
        engine.load_checkpoint(folder)
    except SlideError as error:
        sentence = str(error)
        assert str(folder) in sentence and sentence.isprintable() and len(sentence) < 2000
    assert time.monotonic() - begin < SECONDS
    assert (len(os.listdir("/proc/self/fd")), threading.active_count()) == (descriptors, threads)
    return sentence


BROKEN = {
    "empty": b"",
    "no JSON": b"{",
    "no object": b"[]",
    "number": b"7",
    "null": b"null",
    "not UTF-8": b'{"format": 1, "saved_at": 0, "files": {"\xff": {}}}',
    "UTF-16": '{"format": 1, "saved_at": 0, "files": {}}'.encode("utf-16"),
    "lone surrogate": rb'{"format": 1, "saved_at": 0, "files": {"\ud800": {"bytes": 1, "crc32": "00000000"}}}',
    "infinite time": b'{"format": 1, "saved_at": 1e400, "files": {}}',
    "infinite size": b'{"format": 1, "saved_at": 0, "files": {"a": {"bytes": 1e400, "crc32": "00000000"}}}',
    "NaN": b'{"format": 1, "saved_at": NaN, "files": {}}',
    "many digits": b'{"format": 1, "saved_at": 0, "files": {"a": {"bytes": %s, "crc32": "0"}}}' % (b"9" * 5000),
    "large number": b'{"format": 1, "saved_at": 0, "files": {"a": {"bytes": %s, "crc32": "00000000"}}}' % (b"9" * 99),
    "large time": b'{"format": 1, "saved_at": %s, "files": {}}' % (b"9" * 4000),
    "large format": b'{"format": %s, "saved_at": 0, "files": {}}' % (b"9" * 4000),
    "deep list": b"[" * 1_000_000,
    "deep object": b'{"files":' * 100_000,
    "twice": b'{"format": 1, "saved_at": 0, "files": {}, "files": {}}',
    "file twice": b'{"format": 1, "saved_at": 0, "files": {"a": {"bytes": 1, "bytes": 1, "crc32": "00000000"}}}',
    "negative size": b'{"format": 1, "saved_at": 0, "files": {"a": {"bytes": -1, "crc32": "00000000"}}}',
    "size as text": b'{"format": 1, "saved_at": 0, "files": {"a": {"bytes": "1", "crc32": "00000000"}}}',
    "size as truth": b'{"format": 1, "saved_at": 0, "files": {"a": {"bytes": true, "crc32": "00000000"}}}',
    "sum as number": b'{"format": 1, "saved_at": 0, "files": {"a": {"bytes": 1, "crc32": 0}}}',
    "sum with sign": b'{"format": 1, "saved_at": 0, "files": {"a": {"bytes": 1, "crc32": "-0000001"}}}',
    "no sum": b'{"format": 1, "saved_at": 0, "files": {"a": {"bytes": 1}}}',
    "files as list": b'{"format": 1, "saved_at": 0, "files": []}',
    "no files": b'{"format": 1, "saved_at": 0}',
    "no format": b'{"saved_at": 0, "files": {}}',
    "format as truth": b'{"format": true, "saved_at": 0, "files": {}}',
    "format as text": b'{"format": "1", "saved_at": 0, "files": {}}',
    "another directory": b'{"format": 1, "saved_at": 0, "files": {"../latest": {"bytes": 3, "crc32": "00000000"}}}',
    "absolute": b'{"format": 1, "saved_at": 0, "files": {"/dev/zero": {"bytes": 0, "crc32": "00000000"}}}',
    "NUL in a name": rb'{"format": 1, "saved_at": 0, "files": {"a\u0000": {"bytes": 0, "crc32": "00000000"}}}',
    "lines in a name": rb'{"format": 1, "saved_at": 0, "files": {"a\nb\u001b[2J": {"bytes": 0, "crc32": "00000000"}}}',
    "long name": b'{"format": 1, "saved_at": 0, "files": {"%s": {"bytes": 0, "crc32": "00000000"}}}' % (b"a" * 10_000),
    "large": b" " * (17 << 20),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=list(BROKEN))
def test_a_broken_manifest_is_named(content, engine, folder):
    (folder / "tag" / MANIFEST).write_bytes(content)
    before = Result(states=states_of(engine.module))
    sentence = refusal(engine, folder)
    assert sentence.startswith(f"{folder / 'tag' / MANIFEST} cannot be read") and "the checkpoint is broken" in sentence
    assert differences(Result(states=states_of(engine.module)), before) == []


def test_a_manifest_of_a_later_version_is_told_apart(engine, folder):
    (folder / "tag" / MANIFEST).write_text('{"format": 2, "others": []}')
    assert "has format 2 and this version of DS-Slide knows 1" in refusal(engine, folder)


def test_a_manifest_that_lists_not_what_is_loaded_protects_nothing(engine, folder):
    path = folder / "tag" / MANIFEST
    content = json.loads(path.read_text())
    for name in (MODEL, OPTIMIZER):
        files = {other: entry for other, entry in content["files"].items() if other != name}
        path.write_text(json.dumps({**content, "files": files}))
        assert f"{folder / 'tag' / name} is not in {MANIFEST}" in refusal(engine, folder)


def put_fifo(path: Path) -> None:
    os.mkfifo(path)


def put_socket(path: Path) -> None:
    beside = path.with_name("s")  # the address of a socket is short
    home = os.getcwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("s")
    finally:
        os.chdir(home)
    beside.rename(path)


SPECIAL: dict[str, tuple[Callable[[Path], None], str]] = {
    "directory": (Path.mkdir, "a directory"),
    "FIFO": (put_fifo, "a FIFO"),
    "socket": (put_socket, "a socket"),
    "link to a device": (lambda path: path.symlink_to("/dev/zero"), "a device"),
    "link to a FIFO": (lambda path: (put_fifo(path.with_name("f")), path.symlink_to("f"))[0], "a FIFO"),
    "link to a directory": (lambda path: path.symlink_to("."), "a directory"),
}
special = pytest.mark.parametrize("kind", SPECIAL)


@special
@pytest.mark.parametrize("name", [MANIFEST, MODEL, OPTIMIZER])
@pytest.mark.parametrize("with_manifest", [True, False], ids=["manifest", "none"])
def test_what_is_no_file_is_not_opened(kind, name, with_manifest, engine, folder):
    """A FIFO would wait for a writer for ever."""
    if not with_manifest:
        (folder / "tag" / MANIFEST).unlink()
    path = folder / "tag" / name
    path.unlink(missing_ok=True)
    put, words = SPECIAL[kind]
    put(path)
    sentence = refusal(engine, folder)
    assert f"{path} " in sentence and "broken" in sentence
    if not with_manifest or name == MANIFEST:
        assert f"{path} is {words} instead of a regular file" in sentence


@special
def test_latest_that_is_no_file(kind, engine, folder):
    path = folder / "latest"
    path.unlink()
    put, words = SPECIAL[kind]
    put(path)
    assert f"{path} is {words} instead of a regular file" in refusal(engine, folder)


@special
@pytest.mark.parametrize("file", [MODEL, "zero/optimizer_state.pt", "zero/lm_head.weight/fp32.pt"])
def test_what_is_no_file_of_a_universal_checkpoint(kind, file, universal, tmp_path):
    engine, saved = universal
    folder = tmp_path / "run"
    shutil.copytree(saved, folder)
    path = folder / "tag_universal" / file
    path.unlink()
    put, words = SPECIAL[kind]
    put(path)
    assert f"{path} is {words} instead of a regular file" in refusal(engine, folder)


@pytest.fixture(scope="module")
def universal(engine, tmp_path_factory) -> Iterator[tuple[Any, Path]]:
    """An engine, and a folder with a universal checkpoint that it loads."""
    folder = tmp_path_factory.mktemp("universal")
    engine.save_checkpoint(folder, "tag")
    convert(folder)
    with engine_for(llama(num_hidden_layers=1), ds_config({"window": 2}, checkpoint=UNIVERSAL)) as loading:
        loading.load_checkpoint(folder)
        yield loading, folder


def test_links_to_files_load(engine, folder):
    """The Hub's cache consists of them."""
    for path in [*(folder / "tag").iterdir(), folder / "latest"]:
        path.rename(path.with_name(f"blob-{path.name}"))
        path.symlink_to(f"blob-{path.name}")
    assert refusal(engine, folder) == ""
    (folder / "tag" / f"blob-{MANIFEST}").unlink()
    assert f"{folder / 'tag' / MANIFEST} is a symbolic link to nothing" in refusal(engine, folder)


LATEST = {
    "not UTF-8": (b"\xff\xfe", "is not encoded in UTF-8"),
    "UTF-16": ("tag".encode("utf-16"), "is not encoded in UTF-8"),
    "overlong": (b"a" * 5000, "holds more than 4,096 bytes"),
    "overlong name": (b"a" * 256, "names no directory below"),
    "huge": (b"a" * (10 << 20), "holds more than 4,096 bytes"),
    "empty": (b"", "holds '', which names no directory below"),
    "blank": (b" \n", "holds '', which names no directory below"),
    "outside": (b"../run/tag", r"holds '../run/tag', which names no directory below"),
    "hidden outside": (b"tag/../../run/tag", "names no directory below"),
    "absolute": (b"/etc", "holds '/etc', which names no directory below"),
    "itself": (b".", "names no directory below"),
    "NUL": (b"tag\0", "names no directory below"),
    "lines": (b"tag\ntag", r"holds 'tag\ntag', which names no directory below"),
    "escapes": (b"\x1b[2Jtag", r"holds '\x1b[2Jtag', which names no directory below"),
    "nothing": (b"gone", "there is no checkpoint"),
    "ours": (b".ds_slide_saving.x", "does not name a directory below save_dir"),
}


@pytest.mark.parametrize(("content", "words"), LATEST.values(), ids=list(LATEST))
def test_a_latest_that_names_no_tag(content, words, engine, folder):
    (folder / "latest").write_bytes(content)
    sentence = refusal(engine, folder)
    assert words in sentence
    if "names no" in words:
        assert sentence.startswith(f"{folder / 'latest'}, which names the checkpoint to load")


def test_latest_may_be_a_path_and_end_in_a_line(engine, folder):
    (folder / "latest").write_text("tag\n")
    assert refusal(engine, folder) == ""
    (folder / "epoch").mkdir()
    (folder / "tag").rename(folder / "epoch" / "ü 1")
    (folder / "latest").write_text("epoch/ü 1")
    assert refusal(engine, folder) == ""


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_manifest_that_is_gone_is_said_once(engine, folder, caplog):
    assert refusal(engine, folder) == ""
    assert warnings_of(caplog) == []
    (folder / "tag" / MANIFEST).unlink()
    assert refusal(engine, folder) == ""
    (sentence,) = warnings_of(caplog)
    assert f"{folder / 'tag'} was written by DS-Slide, but its {MANIFEST} is missing" in sentence


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "old_format"])
def test_stock_has_no_manifest_and_none_is_missed(zipped, engine, tmp_path, caplog):
    config = ds_config(None, checkpoint={"checkpoint_serialization": zipped})
    # Even the key is no mark: stock runs with it where DS-Slide is not installed.
    with engine_for(llama(num_hidden_layers=1), config) as stock:
        train(stock, batches(1))
        stock.config["ds_slide"] = {"enabled": True}
        stock.save_checkpoint(tmp_path, "tag")
    caplog.clear()
    assert refusal(engine, tmp_path) == ""
    assert warnings_of(caplog) == []


def test_a_manifest_may_be_required(folder, engine):
    engine.optimizer.require_manifest = True
    try:
        assert refusal(engine, folder) == ""
        (folder / "tag" / MANIFEST).unlink()
        before = Result(states=states_of(engine.module))
        sentence = refusal(engine, folder)
    finally:
        engine.optimizer.require_manifest = False
    assert f"{folder / 'tag'} has no {MANIFEST}, which ds_slide.checkpoint.require_manifest asks for" in sentence
    assert differences(Result(states=states_of(engine.module)), before) == []


def test_the_setting_arrives(tmp_path, saved):
    config = ds_config({"window": 2, "checkpoint": {"require_manifest": True}}, checkpoint=UNIVERSAL)
    with engine_for(llama(num_hidden_layers=1), config) as engine:
        assert engine.optimizer.require_manifest
        shutil.copytree(saved, tmp_path / "run")
        convert(tmp_path / "run")
        assert "asks for a manifest, but universal checkpoints" in refusal(engine, tmp_path / "run")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from([10**400, -1, 2**63, "0" * 8]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn, right: Any) -> bytes:
    """The right manifest with some of its values, keys and bytes changed."""
    content = copy.deepcopy(right)
    for _ in range(draw(st.integers(0, 3))):
        place = content
        while isinstance(place, dict) and place:
            key = draw(st.sampled_from(sorted(place)))
            if not isinstance(place[key], dict) or draw(st.booleans()):
                break
            place = place[key]
        else:
            break
        change = draw(st.sampled_from(["value", "key", "more", "less"]))
        if change == "value":
            place[key] = draw(JSON)
        elif change == "more":
            place[draw(st.text())] = draw(JSON)
        else:
            value = place.pop(key)
            if change == "key":
                place[draw(st.text())] = value
    data = bytearray(json.dumps(content, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass"))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        start = draw(st.integers(0, len(data)))
        data[start : start + draw(st.integers(0, 8))] = draw(st.binary(max_size=8) | st.sampled_from([b"1e400", b"["]))
    return bytes(data)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_manifest_loads_or_is_named(data, engine, folder, right):
    path = folder / "tag" / MANIFEST
    path.write_bytes(data.draw(mutated(right)))
    if refusal(engine, folder) == "":
        # Only what protects all that was loaded.
        manifest = Manifest.read(folder / "tag")
        assert manifest is not None and {MODEL, OPTIMIZER} <= manifest.files.keys()


@pytest.fixture(scope="module")
def right(saved) -> Any:
    return json.loads((saved / "tag" / MANIFEST).read_text())
