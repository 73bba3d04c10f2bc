import json
import re

import pytest
from pydantic import ValidationError

from ds_slide.config import SlideConfig
from ds_slide.errors import SlideConfigError, SlideError


def read(block, **others):
    # Through JSON, because that is how it arrives.
    return SlideConfig.from_deepspeed(json.loads(json.dumps({"ds_slide": block, **others})))


def test_absent_or_disabled_is_none():
    assert SlideConfig.from_deepspeed({}) is None
    assert SlideConfig.from_deepspeed({"zero_optimization": {"stage": 3}}) is None
    assert read({"enabled": False}) is None
    assert read({}) is None


def test_disabled_is_not_even_checked():
    assert read({"enabled": False, "no such key": 1, "window": -7}) is None


def test_defaults():
    config = read({"enabled": True})
    assert config.window == "auto"
    assert config.gpu_memory is None
    assert config.host_memory is None
    assert config.gpu_states == "auto"
    assert config.share_weights == "auto"
    assert config.defer_updates == "auto"
    assert config.gradient_buffers == "auto"
    assert config.nvme_path is None
    assert config.state_dtype == "fp32"
    assert config.ssd_buffers == "auto"
    assert config.weight_buffers == "auto"
    assert config.io_backend == "auto"
    assert config.cpu_threads == "auto"
    assert config.cpu_cores == "auto"
    assert config.blocks == "auto"
    assert config.stream_head is False
    assert config.huge_pages is False
    assert config.kernels == "auto"
    assert config.flat_pieces is False
    assert (config.muon_scale, config.muon_norm, config.muon_kernel) == ("deepspeed", "gradient", "auto")
    assert config.async_save is False
    assert config.checkpoint.require_manifest is False
    assert config.hang_timeout == 300.0
    assert config.compression is None
    assert config.debug.lane_delay_ms == 0
    assert config.debug.seed == 0
    assert (config.debug.out_of_place, config.debug.take_back) == ("auto", 0)
    assert (config.speculate, config.update_passes) == ("auto", "auto")


def test_every_setting_is_read():
    """Each has another value than its default."""
    given = {
        "enabled": True,
        "window": 2,
        "gpu_memory": "24GiB",
        "host_memory": 64e9,
        "gpu_states": "6GiB",
        "activations": "as_written",
        "nvme_path": ["/disk1", "/disk2"],
        "state_dtype": "8bit",
        "ssd_buffers": 5,
        "weight_buffers": 6,
        "io_backend": "libaio",
        "share_weights": False,
        "defer_updates": True,
        "gradient_buffers": 2,
        "cpu_threads": 3,
        "cpu_cores": [0, 2, 4],
        "blocks": ["model.encoder.layers", "model.decoder.layers"],
        "stream_head": True,
        "experts": "1MiB",
        "huge_pages": True,
        "kernels": ["loss", "norm"],
        "flat_pieces": True,
        "muon_scale": "moonlight",
        "muon_norm": "update",
        "muon_kernel": True,
        "async_save": True,
        "checksums": False,
        "checkpoint": {"require_manifest": True},
        "hang_timeout": 60.0,
        "compression": {
            "type": "lsp",
            "d": 512,
            "r": 2,
            "master_dtype": "bf16",
            "check_every": 7,
            "threshold": 0.25,
            "seed": 5,
        },
        "trace": {"path": "step.json", "steps": [5, 7]},
        "captured_blocks": False,
        "update_passes": 2,
        "speculate": True,
        "debug": {"lane_delay_ms": 2.5, "seed": 11, "out_of_place": False, "take_back": 0.5},
    }
    as_read = {
        "gpu_memory": 24 * 2**30,
        "host_memory": 64 * 10**9,
        "gpu_states": 6 * 2**30,
        "experts": 2**20,
        "nvme_path": ("/disk1", "/disk2"),
        "cpu_cores": (0, 2, 4),
        "blocks": ("model.encoder.layers", "model.decoder.layers"),
        "kernels": ("loss", "norm"),
        "trace": {"path": "step.json", "steps": (5, 7)},
    }
    assert read(given).model_dump() == given | as_read


def test_zero_gpu_states_is_a_value():
    assert read({"enabled": True, "gpu_states": 0}).gpu_states == 0


WRONG = [
    ({"enabled": "auto"}, 'ds_slide.enabled is "auto"; expected true or false'),
    ({"enabled": 1}, "ds_slide.enabled is 1; expected true or false"),
    ({"window": 1}, 'ds_slide.window is 1; expected "auto" or an integer from 2 to 4096'),
    ({"window": "all"}, 'ds_slide.window is "all"; expected "auto" or an integer from 2 to 4096'),
    ({"window": 3.0}, 'ds_slide.window is 3.0; expected "auto" or an integer from 2 to 4096'),
    ({"window": True}, 'ds_slide.window is true; expected "auto" or an integer from 2 to 4096'),
    ({"window": None}, 'ds_slide.window is null; expected "auto" or an integer from 2 to 4096'),
    ({"gpu_memory": 0}, "ds_slide.gpu_memory is 0; expected a size"),
    ({"gpu_memory": "24G"}, 'ds_slide.gpu_memory is "24G"; write 24GiB'),
    ({"host_memory": "lots"}, 'ds_slide.host_memory is "lots"; expected a size'),
    ({"gpu_states": -1}, "ds_slide.gpu_states is -1, which is negative; expected"),
    ({"gpu_states": None}, "ds_slide.gpu_states is null; expected"),
    ({"activations": "keep"}, 'ds_slide.activations is "keep"; expected "auto", "whole_blocks" or "as_written"'),
    ({"share_weights": "yes"}, 'ds_slide.share_weights is "yes"; expected "auto", true or false'),
    ({"defer_updates": "yes"}, 'ds_slide.defer_updates is "yes"; expected "auto", true or false'),
    ({"defer_updates": 0}, 'ds_slide.defer_updates is 0; expected "auto", true or false'),
    ({"gradient_buffers": 1}, 'ds_slide.gradient_buffers is 1; expected "auto" or an integer from 2 to 4096'),
    ({"cpu_threads": 0}, 'ds_slide.cpu_threads is 0; expected "auto" or an integer from 1 to 4096'),
    ({"cpu_threads": "all"}, 'ds_slide.cpu_threads is "all"; expected "auto" or'),
    ({"cpu_cores": [0, -1]}, 'ds_slide.cpu_cores is [0, -1]; expected "auto", "none" or a list'),
    ({"cpu_cores": []}, "ds_slide.cpu_cores is []; expected"),
    ({"cpu_cores": "0-3"}, 'ds_slide.cpu_cores is "0-3"; expected'),
    ({"blocks": "model.layers"}, 'ds_slide.blocks is "model.layers"; expected "auto" or a list of module paths'),
    ({"blocks": []}, "ds_slide.blocks is []; expected"),
    ({"blocks": [""]}, 'ds_slide.blocks is [""]; expected'),
    ({"huge_pages": "auto"}, 'ds_slide.huge_pages is "auto"; expected true or false'),
    ({"kernels": True}, 'ds_slide.kernels is true; expected "auto", "off" or a list out of "loss"'),
    ({"kernels": "on"}, 'ds_slide.kernels is "on"; expected'),
    ({"kernels": []}, "ds_slide.kernels is []; expected"),
    ({"kernels": ["loss", "head"]}, 'ds_slide.kernels is ["loss", "head"]; expected'),
    ({"checkpoint": True}, "ds_slide.checkpoint is true; expected an object"),
    ({"checkpoint": {"require_manifest": 1}}, "ds_slide.checkpoint.require_manifest is 1; expected true or false"),
    ({"checkpoint": {"manifest": True}}, "did you mean ds_slide.checkpoint.require_manifest?"),
    ({"debug": 3}, "ds_slide.debug is 3; expected an object"),
    ({"debug": {"lane_delay_ms": -1}}, "ds_slide.debug.lane_delay_ms is -1; expected a number of milliseconds"),
    ({"debug": {"speculate": False}}, "ds_slide.debug.speculate is no test switch any more; set ds_slide.speculate in"),
    ({"debug": {"mix": False}}, 'set ds_slide.activations, where "whole_blocks" is what false was, in its place'),
    ({"update_passes": 3}, 'ds_slide.update_passes is 3; expected "auto", 1 or 2'),
    ({"speculate": 1}, 'ds_slide.speculate is 1; expected "auto", true or false'),
    ({"debug": {"seed": "x"}}, 'ds_slide.debug.seed is "x"; expected an integer'),
    # What no machine can do, before anything of it is begun.
    ({"window": 10**20}, 'ds_slide.window is 100000000000000000000; expected "auto" or an integer from 2 to 4096'),
    ({"weight_buffers": 4097}, 'ds_slide.weight_buffers is 4097; expected "auto" or an integer from 2 to 4096'),
    ({"ssd_buffers": 10**9}, 'ds_slide.ssd_buffers is 1000000000; expected "auto" or'),
    ({"gradient_buffers": 10**9}, 'ds_slide.gradient_buffers is 1000000000; expected "auto" or an integer from'),
    ({"cpu_threads": 10**12}, 'ds_slide.cpu_threads is 1000000000000; expected "auto" or an integer from 1 to 4096'),
    ({"cpu_threads": 10**6}, 'ds_slide.cpu_threads is 1000000; expected "auto" or an integer from 1 to 4096'),
    (
        {"cpu_cores": [10**20]},
        'ds_slide.cpu_cores is [100000000000000000000]; expected "auto", "none" or a list of core',
    ),
    ({"host_memory": "9" * 5000}, 'ds_slide.host_memory is "999'),
    ({"host_memory": 2**64}, "ds_slide.host_memory is 18446744073709551616, which is more than 8 EiB; expected"),
    ({"hang_timeout": 1e300}, "ds_slide.hang_timeout is 1e+300; expected a number of seconds from 0.1 to"),
    ({"hang_timeout": 1e-9}, "ds_slide.hang_timeout is 1e-09; expected a number of seconds from 0.1 to"),
    ({"debug": {"lane_delay_ms": 1e300}}, "ds_slide.debug.lane_delay_ms is 1e+300; expected a number of milliseconds"),
    ({"debug": {"seed": 2**63}}, "ds_slide.debug.seed is 9223372036854775808; expected an integer from 0 to 2^63 - 1"),
    # Directories that cannot be.
    ({"nvme_path": ""}, 'ds_slide.nvme_path is "", which names no directory; name one'),
    ({"nvme_path": "a\0b"}, 'ds_slide.nvme_path is "a\\u0000b", which has a NUL character'),
    ({"nvme_path": ["/a", "b\0"]}, 'ds_slide.nvme_path[1] is "b\\u0000", which has a NUL character'),
    (
        {"nvme_path": "file:///local"},
        'ds_slide.nvme_path is "file:///local", which is a URL; write the directory itself',
    ),
    ({"nvme_path": "s3://bucket"}, 'ds_slide.nvme_path is "s3://bucket", which is a URL; write the directory itself'),
    ({"nvme_path": "\ud800"}, 'ds_slide.nvme_path is "\\ud800", which has characters that no path may have'),
    ({"nvme_path": "/" + "a" * 256}, "which is longer than a path may be (4095 bytes, 255 for each name in it)"),
    ({"nvme_path": "/a" * 2048}, "which is longer than a path may be (4095 bytes, 255 for each name in it)"),
    ({"nvme_path": [f"/disk{i}" for i in range(33)]}, "expected a directory, a list of at most 32 directories on"),
    ({"nvme_path": 7}, "ds_slide.nvme_path is 7; expected a directory, a list of at most 32 directories on"),
    # Unknown keys, with the nearest setting.
    ({"a\nb": 3}, 'ds_slide."a\\nb" is not a setting of DS-Slide; the settings of ds_slide are enabled, window'),
    ({"\ud800": 3}, 'ds_slide."\\ud800" is not a setting of DS-Slide'),
    ({"w" * 10**6: 3}, "is not a setting of DS-Slide"),
    ({"windw": 3}, "ds_slide.windw is not a setting of DS-Slide; did you mean ds_slide.window?"),
    ({"gpu_mem": "1GiB"}, "did you mean ds_slide.gpu_memory?"),
    ({"defer_update": True}, "did you mean ds_slide.defer_updates?"),
    ({"pin_cores": [1]}, "did you mean ds_slide.cpu_cores?"),
    ({"zzz": 1}, "ds_slide.zzz is not a setting of DS-Slide; the settings of ds_slide are enabled, window, gpu_memory"),
    ({"debug": {"sed": 1}}, "ds_slide.debug.sed is not a setting of DS-Slide; did you mean ds_slide.debug.seed?"),
]


@pytest.mark.parametrize(("block", "message"), WRONG, ids=[json.dumps(block) for block, _ in WRONG])
def test_a_wrong_value_is_named_with_what_was_expected(block, message):
    with pytest.raises(SlideConfigError, match=re.escape(message)) as caught:
        read({"enabled": True, **block})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 800


def test_values_and_keys_that_only_python_can_write():
    """A config that is given as a dict need not be JSON."""
    for block, message in (
        ({"window": 10**5000}, 'ds_slide.window is an integer of 16,610 bits; expected "auto" or an integer from 2'),
        ({"window": [10**5000]}, "ds_slide.window is a value of type list that cannot be written as JSON; expected"),
        ({7: 1}, "ds_slide.7 is not a setting of DS-Slide; the settings of ds_slide are"),
        ({"debug": {None: 1}}, "ds_slide.debug.null is not a setting of DS-Slide; the settings of ds_slide.debug are"),
    ):
        with pytest.raises(SlideConfigError, match=re.escape(message)):
            SlideConfig.from_deepspeed({"ds_slide": {"enabled": True, **block}})


@pytest.mark.parametrize("block", [True, "on", None, [], 1])
def test_the_block_must_be_an_object(block):
    with pytest.raises(SlideConfigError, match=r'^ds_slide is .*; expected an object such as \{"enabled": true\}'):
        read(block)


def test_a_misspelt_enabled_is_an_error_and_not_off():
    with pytest.raises(SlideConfigError, match=r"ds_slide\.enabeld .* did you mean ds_slide\.enabled\?"):
        read({"enabeld": True})


def test_the_manifest_is_not_required_in_deepspeeds_own_block():
    """DeepSpeed would ignore it there without a word."""
    with pytest.raises(SlideConfigError, match=r"write it as ds_slide\.checkpoint\.require_manifest"):
        read({"enabled": True}, checkpoint={"require_manifest": True})
    assert read({"enabled": True}, checkpoint={"load_universal": True}).enabled


def test_frozen():
    config = read({"enabled": True})
    with pytest.raises(ValidationError):
        config.window = 5


def test_every_setting_says_what_it_expects_and_what_it_is():
    import ast
    import inspect

    from ds_slide.config.schema import CheckpointConfig, DebugConfig

    for model in (SlideConfig, CheckpointConfig, DebugConfig):
        assert all(field.description for field in model.model_fields.values())
        body = ast.parse(inspect.getsource(model)).body[0].body
        for statement, after in zip(body, [*body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign):
                assert isinstance(after, ast.Expr), f"{model.__name__}.{statement.target.id} has no docstring"


def test_errors_are_both_kinds():
    assert issubclass(SlideConfigError, SlideError)
    assert issubclass(SlideConfigError, ValueError)
    assert issubclass(SlideError, RuntimeError)
