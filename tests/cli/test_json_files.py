"""`ds-slide check` and `ds-slide convert`: every refusal at once, in the words of the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_slide.cli.__main__ import main
from ds_slide.errors import SlideConfigError
from ds_slide.integration.early import check_json
from ds_slide.integration.json_check import REPLACED, converted, refusals

ROOT = Path(__file__).resolve().parents[2]
FAULTY = {
    "zero_optimization": {
        "stage": 2,
        "zenflow": {"topk_ratio": 0.1},
        "zero_quantized_weights": True,
        "offload_optimizer": {"device": "cpu", "ratio": 0.5},
    },
    "tensor_parallel": {"autotp_size": 2},
    "gradient_clipping": 1.0,
    "optimizer": {"type": "Lamb"},
    "ds_slide": {
        "enabled": True,
        "windw": 3,
        "window": 1,
        "gpu_memory": "lots",
        "debug": {"sed": 1, "lane_delay_ms": -1},
        "defer_updates": False,
    },
}
BEGINNINGS = (
    "ds_slide.windw is not a setting",
    "ds_slide.debug.sed is not a setting",
    "ds_slide.window is 1;",
    'ds_slide.gpu_memory is "lots";',
    "ds_slide.debug.lane_delay_ms is -1;",
    "zero_optimization.stage is 2,",
    'optimizer.type is "Lamb",',
    "tensor_parallel.autotp_size is 2,",
    "zero_optimization.zero_quantized_weights is true,",
    "zero_optimization.offload_optimizer.ratio is 0.5,",
    "zero_optimization.zenflow is set,",
    "ds_slide.defer_updates is false,",
)


def ran(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    """Exit code and output of a command."""
    with pytest.raises(SystemExit) as ended:
        main([str(each) for each in arguments])
    printed = capsys.readouterr()
    return int(str(ended.value.code)), printed.out + printed.err


def test_every_refusal_at_once(tmp_path, capsys):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(FAULTY))
    code, said = ran(capsys, "check", file)
    lines = said.splitlines()
    assert (code, lines[0]) == (1, f"{file}: refused, for {len(BEGINNINGS)} reasons")
    assert [line.removeprefix("* ").startswith(each) for line, each in zip(lines[1:], BEGINNINGS, strict=True)] == [
        True
    ] * len(BEGINNINGS), said


def test_what_is_left_after_the_cure_is_accepted():
    """Each refusal names a fault of its own: without all of them there is none."""
    cured = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW"}, "ds_slide": {"enabled": True}}
    assert refusals(cured) == []
    for key in FAULTY:
        assert refusals({**cured, key: FAULTY[key]}) != [] or key == "gradient_clipping"


@pytest.mark.parametrize(
    "raw",
    [
        {"zero_optimization": ["stage"], "ds_slide": {"enabled": True}},
        {"zero_optimization": {"stage": 3, "offload_param": 3}, "aio": 1, "ds_slide": {"enabled": True}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": [1]}}, "ds_slide": {}},
        {"zero_optimization": {"stage": 3}, "ds_slide": 7},
        {"zero_optimization": {"stage": 3}, "ds_slide": {"enabled": "yes"}},
        {"zero_optimization": {"stage": 3}, "ds_slide": {"compression": {"d": 3}}},
        {"zero_optimization": {"stage": 3}, "checkpoint": {"require_manifest": True}, "ds_slide": {"enabled": True}},
    ],
)
def test_values_of_any_type_are_refused_in_words(raw):
    found = refusals(raw)
    assert found and len(set(found)) == len(found)


def test_an_engine_refuses_what_check_refuses():
    """The first place that reads the JSON stops at the block; each of its sentences is one of ours."""
    raw = {**FAULTY, "ds_slide": {"enabled": True}, "zero_optimization": {**FAULTY["zero_optimization"], "stage": 3}}
    with pytest.raises(SlideConfigError) as refused:
        check_json(raw)
    assert set(str(refused.value).splitlines()) < set(refusals(raw))


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "configs").glob("stock_*.json")))
def test_the_configs_of_this_repository_are_converted_and_accepted(name, tmp_path, capsys):
    source, target = ROOT / "configs" / name, tmp_path / "ds.json"
    code, said = ran(capsys, "check", source)
    assert code == 1 and 'has no key "ds_slide"' in said and said.endswith("accepted\n")
    code, said = ran(capsys, "convert", source, "--write", target)
    assert code == 0 and '+  "ds_slide": {' in said and said.endswith(f"{target}: accepted\n")
    assert json.loads(target.read_text()) == {**json.loads(source.read_text()), "ds_slide": {"enabled": True}}
    assert ran(capsys, "check", target) == (0, f"{target}: accepted\n")
    assert ran(capsys, "convert", target) == (0, f"{target}: nothing to change\n{target}: accepted\n")


def test_convert_drops_each_setting_that_is_replaced_and_nothing_else():
    raw: dict = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 3, "overlap_comm": True},
        "aio": {"queue_depth": 8},
    }
    for row in REPLACED:
        section = raw
        for key in row.section.split("."):
            section = section.setdefault(key, {})
        section.update(dict.fromkeys(row.names, 1))
    raw["zero_optimization"]["offload_param"]["device"] = "cpu"
    made, notes = converted(raw)
    assert made == {
        "train_batch_size": 8,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": True,
            "offload_optimizer": {},
            "offload_param": {"device": "cpu"},
        },
        "aio": {"queue_depth": 8},
        "ds_slide": {"enabled": True},
    }
    assert len(notes) == 1 + sum(len(row.names) for row in REPLACED)


def test_comments_are_not_lost(tmp_path, capsys):
    """DeepSpeed's reader takes them, and a file with them is not overwritten."""
    file = tmp_path / "ds.json"
    file.write_text('{\n  # by hand\n  "zero_optimization": {"stage": 3},\n}\n')
    code, said = ran(capsys, "convert", file, "--write", file)
    assert code == 1 and "has comments" in said and "# by hand" in file.read_text()
    code, said = ran(capsys, "convert", file, "--write", tmp_path / "new.json")
    assert code == 0, said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', 'the key "a" stands there twice'),
        ('{"a": ', "is not JSON"),
        ("[1]", "is not a JSON object"),
        (None, "cannot be read"),
    ],
)
def test_what_is_no_json_is_said(text, words, tmp_path, capsys):
    file = tmp_path / "ds.json"
    if text is not None:
        file.write_text(text)
    code, said = ran(capsys, "check", file)
    assert code == 1 and words in said
