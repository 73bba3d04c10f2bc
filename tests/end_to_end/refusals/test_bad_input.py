"""Everything that DS-Slide refuses: the pure checks one by one, and some of them through deepspeed.initialize."""

import json
import os
import re
import textwrap

import deepspeed
import pytest
import warm
from accelerate import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from deepspeed.runtime.config import DeepSpeedConfig
from ports import free_port
from torch import nn

from ds_slide.config import SlideConfig
from ds_slide.errors import SlideConfigError
from ds_slide.integration.activation import warn_if_meant
from ds_slide.integration.contract import check_deepspeed_config
from ds_slide.integration.early import as_written, check_json
from ds_slide.integration.refused import REFUSED_ENGINE_SETTINGS, REFUSED_ZERO_SETTINGS, Refused, setting_problems

SLIDE = {"enabled": True}
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
NVME = {"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}


def ds_config(zero=None, slide=None, **others):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": ADAMW,
        "zero_optimization": {"stage": 3, **(zero or {})},
        "ds_slide": SLIDE | (slide or {}),
        **others,
    }
    return {key: value for key, value in config.items() if value is not None}


def check(config, model=None, **arguments):
    slide = SlideConfig.from_deepspeed(config)
    check_deepspeed_config(DeepSpeedConfig(config), slide, model=model or nn.Linear(2, 2), **arguments)


@pytest.mark.parametrize(
    "config",
    [
        ds_config(),
        ds_config({"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
        ds_config({"offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}),
        ds_config({"leaf_module": {"classes": ["MyBlock"]}}),
        ds_config({"overlap_comm": True, "sub_group_size": 1e8, "stage3_prefetch_bucket_size": 0}),
        ds_config(gradient_clipping=1.0, gradient_accumulation_steps=4),
        ds_config(bf16=None, fp16={"enabled": True}),
        ds_config(bf16=None),
        ds_config(optimizer={"type": "Adam", "params": {"lr": 1e-3}}),
        ds_config(tensor_parallel={"autotp_size": 1}),
        ds_config(slide={"defer_updates": False}, gradient_clipping=0.0),
    ],
    ids=json.dumps,
)
def test_accepted_configs(config):
    check(config)


# The message starts with the JSON path of what is wrong and ends with what to do.
CONFIGS = [
    (ds_config({"stage": 0}), "zero_optimization.stage is 0, but DS-Slide is an engine for stage 3; set it to 3 or"),
    (ds_config({"stage": 2}), "zero_optimization.stage is 2, but DS-Slide is an engine for stage 3; set it to 3 or"),
    (ds_config(zero_optimization=None), "zero_optimization.stage is 0, but"),
    (
        ds_config({"offload_optimizer": {"device": "nvme"}}),
        'zero_optimization.offload_optimizer.device is "nvme", but no directory is named; set',
    ),
    (
        ds_config({"offload_param": {"device": "nvme"}}),
        'zero_optimization.offload_param.device is "nvme", but no directory is named; set',
    ),
    (ds_config(slide={"nvme_path": "/tmp"}), 'ds_slide.nvme_path is set, but no offload device is "nvme"; set'),
    (ds_config(NVME, aio={"block_size": 1000}), "aio.block_size is 1000, but"),
    (ds_config(NVME, aio={"queue_depth": 0}), "aio.queue_depth is 0; expected"),
    (ds_config(NVME, aio={"queue_depth": 4097}), "aio.queue_depth is 4097; expected an integer from 1 to 4096"),
    (ds_config(NVME, aio={"queue_depth": True}), "aio.queue_depth is true; expected an integer from 1 to 4096"),
    (ds_config(aio=[1]), 'aio is [1]; expected an object such as {"queue_depth": 32}, or leave it out'),
    (ds_config(aio="threads"), 'aio is "threads"; expected an object'),
    (ds_config(zero_optimization=["stage", 3]), 'zero_optimization is ["stage", 3]; expected an object such as'),
    (ds_config(zero_optimization="3"), 'zero_optimization is "3"; expected an object such as'),
    *(
        (
            ds_config({section: value}),
            f'zero_optimization.{section} is {json.dumps(value)}; expected an object such as {{"device": "cpu"}}',
        )
        for section in ("offload_optimizer", "offload_param")
        for value in (True, 3, "nvme", ["nvme"])
    ),
    *(
        (
            ds_config({"offload_param": {"device": value}}),
            f'zero_optimization.offload_param.device is {json.dumps(value)}; expected "none", "cpu" or "nvme"',
        )
        for value in (None, 3, "disk", ["nvme"], {"nvme": 1})
    ),
    *(
        (
            ds_config({"offload_param": {"device": "nvme", "nvme_path": value}}),
            f"zero_optimization.offload_param.nvme_path is {json.dumps(value)}{what}; ",
        )
        for value, what in (
            (["/tmp"], ""),
            (3, ""),
            (True, ""),
            ({}, ""),
            ("a\0b", ", which has a NUL character, as no path may"),
            ("file:///tmp", ", which is a URL"),
            ("~nosuchuser", ', but there is no home directory of "nosuchuser"'),
            ("$NO_SUCH_VARIABLE/x", ', but the environment variable "NO_SUCH_VARIABLE" is not set in this process'),
        )
    ),
    (
        ds_config(NVME, {"nvme_path": ["/tmp", "/usr", "/usr/../tmp/"]}),
        'ds_slide.nvme_path[2] is "/tmp", which is the same directory as ds_slide.nvme_path[0]; name each directory',
    ),
    (ds_config(NVME, {"nvme_path": ["/tmp"] * 100}), 'ds_slide.nvme_path is ["/tmp", "/tmp", '),
    (ds_config(NVME, {"nvme_path": "$NO_SUCH_VARIABLE"}), 'ds_slide.nvme_path is "$NO_SUCH_VARIABLE", but the environ'),
    (ds_config(NVME, aio={"block_size": 2 << 30}), "aio.block_size is 2147483648, but a request has 1073741824 bytes"),
    (
        ds_config(slide={"state_dtype": "8bit", "gpu_states": "1GiB"}),
        'ds_slide.state_dtype is "8bit", which is updated on the CPU, but',
    ),
    (
        ds_config({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}),
        "zero_optimization.offload_optimizer.ratio is 0.5, but",
    ),
    (
        ds_config({"offload_optimizer": {"device": "cpu", "super_offload": True}}),
        "zero_optimization.offload_optimizer.super_offload is true, but",
    ),
    (ds_config({"zenflow": {"topk_ratio": 0.1}}), "zero_optimization.zenflow is set, but"),
    (ds_config({"zero_hpz_partition_size": 2}), "zero_optimization.zero_hpz_partition_size is 2, but"),
    (ds_config({"zero_quantized_weights": True}), "zero_optimization.zero_quantized_weights is true, but"),
    (
        ds_config({"zero_quantized_nontrainable_weights": True}),
        "zero_optimization.zero_quantized_nontrainable_weights is true, but",
    ),
    (ds_config({"zero_quantized_gradients": True}), "zero_optimization.zero_quantized_gradients is true, but"),
    (ds_config({"elastic_checkpoint": True}), "zero_optimization.elastic_checkpoint is true, but"),
    (ds_config(prescale_gradients=True), "prescale_gradients is true, but"),
    (ds_config(gradient_predivide_factor=2.0), "gradient_predivide_factor is 2.0, but"),
    (
        ds_config(bf16={"enabled": True, "bf16_master_weights_and_grads": True}),
        "bf16.bf16_master_weights_and_grads is true, but",
    ),
    (
        ds_config(bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}),
        "bf16.bf16_optimizer_states is true, but",
    ),
    (
        ds_config(bf16=None, fp16={"enabled": True, "fp16_master_weights_and_grads": True}),
        "fp16.fp16_master_weights_and_grads is true, but",
    ),
    (ds_config(bf16=None, torch_autocast={"enabled": True}), "torch_autocast.enabled is true, but"),
    (ds_config(hybrid_engine={"enabled": True}), "hybrid_engine.enabled is true, but"),
    (ds_config(compile={"deepcompile": True}), "compile.deepcompile is true, but"),
    (ds_config(tensor_parallel={"autotp_size": 2}), "tensor_parallel.autotp_size is 2, but"),
    (ds_config(expert_parallel={"enabled": True}), "expert_parallel.enabled is true, but"),
    (ds_config(sequence_parallel_size=2), "sequence_parallel_size is 2, but"),
    (ds_config({"pipeline_loading_checkpoint": True}), "zero_optimization.pipeline_loading_checkpoint is true, but"),
    (
        ds_config(slide={"defer_updates": False}, gradient_clipping=0.0, managed_gradient_accumulation=False),
        "ds_slide.defer_updates is false, but managed_gradient_accumulation is false,",
    ),
    *(
        (
            ds_config(optimizer={"type": name, "params": {}}),
            f'optimizer.type is "{name}", but DS-Slide has no such optimizer; use "adamw", "adam", "lion", "SGD", "mu',
        )
        for name in ("sgd", "lamb", "adagrad")
    ),
    (
        ds_config(slide={"defer_updates": False}, gradient_clipping=1.0),
        "ds_slide.defer_updates is false, but gradient_clipping is 1.0,",
    ),
    (
        ds_config(slide={"defer_updates": False}, gradient_clipping=0.0, gradient_accumulation_steps=4),
        "ds_slide.defer_updates is false, but gradient_accumulation_steps is 4,",
    ),
    (
        ds_config(slide={"defer_updates": False}, gradient_clipping=0.0, bf16=None, fp16={"enabled": True}),
        "ds_slide.defer_updates is false, but fp16 can overflow,",
    ),
]


@pytest.mark.parametrize(("config", "message"), CONFIGS, ids=[message for _, message in CONFIGS])
def test_refused_configs(config, message):
    with pytest.raises(SlideConfigError) as caught:
        check(config)
    found = [line for line in str(caught.value).splitlines() if line.startswith(message)]
    assert len(found) == 1, str(caught.value)
    assert "; " in found[0], "what to do is missing"


def test_links_to_one_directory(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    (tmp_path / "circle").symlink_to("circle")
    below = ["disk/new", "link/new"]  # not there yet
    for names in (["disk", "link"], below):
        config = ds_config(NVME, {"nvme_path": [str(tmp_path / name) for name in names]})
        with pytest.raises(SlideConfigError, match=r"nvme_path\[1\] is .*, which is the same directory as .*\[0\];"):
            check(config)
    check(ds_config(NVME, {"nvme_path": [str(tmp_path / name) for name in ("disk", "disk/new", "circle")]}))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["circle", "disk", "link"]


def test_cores_that_the_threads_cannot_be_pinned_to():
    usable = sorted(os.sched_getaffinity(0))
    check(ds_config(slide={"cpu_cores": usable}))
    with pytest.raises(SlideConfigError, match=r"^ds_slide\.cpu_cores names core 1023, which this process may not use"):
        check(ds_config(slide={"cpu_cores": [*usable, 1023]}))
    assert sorted(os.sched_getaffinity(0)) == usable
    without = ds_config(slide={"cpu_cores": [1023]}, optimizer=None)
    check(without)  # nothing is updated


BY_SCRIPT = ("optimizer.type", "no optimizer", "sequence_parallel_size")
"""What a script may still mend."""
JSON_ALONE = [row for row in CONFIGS if not row[1].startswith(BY_SCRIPT)]


@pytest.mark.parametrize(("config", "message"), JSON_ALONE, ids=[message for _, message in JSON_ALONE])
def test_refused_where_the_json_is_read(config, message):
    for read in (HfDeepSpeedConfig, check_json, lambda raw: deepspeed.zero.Init(config_dict_or_path=raw)):
        with pytest.raises(SlideConfigError, match=re.escape(message)):
            read(config)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "gradient_accumulation_steps": "auto"},
        {"slide": {"defer_updates": False}, "gradient_clipping": "auto", "fp16": {"enabled": "auto"}},
        {"optimizer": {"type": "Lamb", "params": {"lr": "auto"}}},  # the script may bring its own
        {"optimizer": None},
    ],
    ids=json.dumps,
)
def test_what_the_json_alone_does_not_decide(others):
    config = ds_config(**others)
    HfDeepSpeedConfig(config)
    check_json(config)


AUTO = {
    "stage": ({"stage": "auto"}, 'zero_optimization.stage is "auto", but nothing has filled it in; set it to 3'),
    "device": (
        {"offload_optimizer": {"device": "auto", "nvme_path": "auto"}},
        'zero_optimization.offload_optimizer.device is "auto"; expected "none", "cpu" or "nvme"',
    ),
    "nvme_path": (
        {"offload_param": {"device": "nvme", "nvme_path": "auto"}},
        'zero_optimization.offload_param.nvme_path is "auto", which is no directory but',
    ),
}


@pytest.mark.parametrize("case", AUTO)
def test_what_accelerate_fills_in_later_is_refused_by_the_engine_only(case):
    zero, message = AUTO[case]
    HfDeepSpeedConfig(ds_config(zero))
    check_json(ds_config(zero))
    with pytest.raises(SlideConfigError, match=f"^{re.escape(message)}"):
        check(ds_config(zero))


def test_a_device_that_may_become_nvme():
    section = {"offload_optimizer": {"device": "auto"}}
    check_json(ds_config(section, {"nvme_path": "/tmp"}))
    with pytest.raises(SlideConfigError, match=r"^aio\.queue_depth is 0; expected"):  # what is settled is told
        check_json(ds_config(NVME | {"offload_param": {"device": "cpu", "nvme_path": "auto"}}, aio={"queue_depth": 0}))


def test_placeholders_for_a_directory_that_nothing_reads():
    section = {"offload_optimizer": {"device": "cpu", "nvme_path": "auto"}}
    on_nvme = {"offload_optimizer": {"device": "nvme", "nvme_path": "none"}}
    for config in (ds_config(section), ds_config(on_nvme, {"nvme_path": "/tmp"})):
        check_json(config)
        check(config)


@pytest.mark.parametrize("directory", [None, "/tmp"])
def test_the_plugin_of_accelerate_fills_in_what_is_auto(monkeypatch, directory):
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "nvme")
    if directory:
        monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", directory)
    zero = {"stage": "auto", "offload_optimizer": {"device": "auto", "nvme_path": "auto"}}
    config = DeepSpeedPlugin(hf_ds_config=ds_config(zero)).deepspeed_config
    assert config["zero_optimization"] == {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": directory or "none"},
    }
    if directory:
        check(config)
        return
    with pytest.raises(SlideConfigError, match=r'^zero_optimization.offload_optimizer.nvme_path is "none", which'):
        check(config)


class TestFiles:
    """What is read before DeepSpeed reads the same file."""

    @pytest.fixture
    def read(self, tmp_path):
        def read(text):
            file = tmp_path / "config.json"
            file.write_bytes(text)
            return as_written(str(file))

        return read

    def test_as_deepspeed_reads_it(self, read):
        text = b'{\n  # a comment\n  "ds_slide": {"enabled": true}, // another\n  "aio": {"block_size": 1,},\n}'
        assert read(text) == {"ds_slide": {"enabled": True}, "aio": {"block_size": 1}}

    @pytest.mark.parametrize("text", [b'{"a": 1, "a": 2}', b"{", b"[1]", b"\xff", b'{"a":' * 10_000])
    def test_what_deepspeed_has_to_judge(self, read, text):
        assert read(text) is None

    def test_a_file_that_cannot_be_read(self, tmp_path, monkeypatch):
        file = tmp_path / "config.json"
        file.write_text("{}")
        assert as_written(file) == {}

        def refuse(*_args, **_kwargs):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr("builtins.open", refuse)  # root may read everything
        monkeypatch.setattr("io.open", refuse)
        assert as_written(file) is None


def test_off_is_off_where_the_json_is_read():
    HfDeepSpeedConfig(ds_config({"stage": 2}, ds_slide=None))
    HfDeepSpeedConfig(ds_config({"stage": 2}, ds_slide={"enabled": False, "windw": 2}))


def test_every_setting_of_the_tables_is_refused_in_a_config_above():
    messages = [message for _, message in CONFIGS]
    for setting in (*REFUSED_ENGINE_SETTINGS, *REFUSED_ZERO_SETTINGS):
        # DeepSpeed 0.19 refuses MiCS itself; 0.18 has it.
        if setting.name != "mics_shard_size":
            assert any(message.startswith(setting.path) for message in messages), setting.path
    problems = list(setting_problems({"mics_shard_size": 4}, REFUSED_ZERO_SETTINGS))
    assert problems == ["zero_optimization.mics_shard_size is 4, but DS-Slide does not support it; remove it"]


def test_all_problems_at_once_one_line_each():
    config = ds_config({"zero_quantized_weights": True, "zero_hpz_partition_size": 2}, gradient_predivide_factor=2.0)
    with pytest.raises(SlideConfigError) as caught:
        check(config)
    assert len(str(caught.value).splitlines()) == 3


def test_an_absent_setting_counts_as_its_first_allowed_value():
    setting = Refused("name", "path", "no", "do", (1, 0))
    assert list(setting_problems({}, [setting])) == []
    assert list(setting_problems({"name": 0}, [setting])) == []
    assert list(setting_problems({"name": 2}, [setting])) == ["path is 2, but no; do"]


def test_mpu():
    with pytest.raises(SlideConfigError, match=r"an mpu is passed .* pass mpu=None"):
        check(ds_config(), mpu=object())


class Sequences:
    """What `parallel_state_sp` tells of groups that need two ranks."""

    initialize_sequence_parallel = None

    def get_sequence_parallel_world_size(self):
        return 2


class Mesh:
    """A mesh of data and sequence ranks, as `initialize` makes it of `mesh_param`."""

    def size(self, dimension):
        return (1, 2)[dimension]


@pytest.mark.parametrize("others", [{}, {"sequence_parallel_size": 2}])
def test_the_mpu_of_divided_sequences_is_accepted(others):
    check(ds_config(**others), mpu=Sequences())
    check_json(ds_config(**others))


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (ds_config(), {"mesh_device": Mesh()}, "a mesh divides sequences (mesh_param,"),
        (ds_config(sequence_parallel_size=4), {"mpu": Sequences()}, "sequence_parallel_size is 4, but the mpu of"),
        (ds_config({"reduce_scatter": False}), {"mpu": Sequences()}, "zero_optimization.reduce_scatter is false, with"),
        (
            ds_config(slide={"compression": {"type": "lsp"}}),
            {"mpu": Sequences()},
            "ds_slide.compression is set, but it",
        ),
    ],
)
def test_divided_sequences_that_are_refused(config, arguments, message):
    with pytest.raises(SlideConfigError) as caught:
        check(config, **arguments)
    assert any(line.startswith(message) for line in str(caught.value).splitlines()), caught.value


def test_a_mesh_of_the_json_is_refused_where_it_is_read():
    with pytest.raises(SlideConfigError, match="a mesh divides sequences"):
        check_json(ds_config(sequence_parallel_size=2, data_parallel_size=2))


@pytest.mark.parametrize(
    ("block", "warning"),
    [
        ({"ds_slide": {"window": 3}}, "ds_slide.enabled is absent from the config and false by default"),
        ({"ds-slide": {}}, "the config has the key 'ds-slide', which DeepSpeed ignores; was ds_slide meant?"),
        ({"DS_SLIDE": {}}, "the config has the key 'DS_SLIDE', which DeepSpeed ignores"),
        ({"ds_slide": {"enabled": False}}, None),
        ({}, None),
    ],
)
def test_a_block_without_effect_is_pointed_out(caplog, block, warning):
    warn_if_meant(DeepSpeedConfig({"train_batch_size": 1, **block}))
    assert [record.getMessage()[: len(warning or "")] for record in caplog.records] == ([warning] if warning else [])


# Through deepspeed.initialize, in one process that goes on after each refusal. The last case has no DS-Slide in its
# config: a refusal must leave nothing behind that touches a stock engine.
INITIALIZE = textwrap.dedent(
    """
    import json, sys
    import torch, deepspeed
    deepspeed.init_distributed("gloo")
    for config, optimizer in json.load(open(sys.argv[1])):
        model = torch.nn.Linear(4, 4)
        client = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1) if optimizer else None
        try:
            engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=client)
            outcome = [type(engine.optimizer).__name__, ""]
        except Exception as error:
            outcome = [type(error).__name__, str(error)]
        partitioned = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
        print("OUTCOME", json.dumps([*outcome, partitioned]), flush=True)
    """
)
END_TO_END = {
    "stage 2": (ds_config({"stage": 2}), None, "zero_optimization.stage is 2, but"),
    "no ZeRO": (ds_config(zero_optimization=None), None, "zero_optimization.stage is 0, but"),
    "LBFGS": (ds_config(optimizer=None), "LBFGS", "torch.optim.lbfgs.LBFGS needs a closure in step()"),
    "nvme": (
        ds_config({"offload_param": {"device": "nvme"}}),
        None,
        'zero_optimization.offload_param.device is "nvme", but',
    ),
    "unknown key": (
        ds_config(slide={"windows": 4}),
        None,
        "ds_slide.windows is not a setting of DS-Slide; did you mean",
    ),
}
# Found while the engine is built, still before its first step.
WHILE_BUILT = {
    "host budget": (ds_config(slide={"host_memory": 64}), None, "host tier: "),
    "GPU budget": (ds_config(slide={"gpu_memory": 64}), None, "GPU tier: "),
    "core": (ds_config(slide={"cpu_threads": 1, "cpu_cores": [1023]}), None, "ds_slide.cpu_cores names core 1023, wh"),
    "blocks": (
        ds_config(slide={"blocks": ["layers"]}),
        None,
        'ds_slide.blocks[0]: "layers" is no module of this model',
    ),
}
STOCK = (ds_config(ds_slide=None), None)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad_input")
    (folder / "initialize.py").write_text(INITIALIZE)
    cases = [(config, optimizer) for config, optimizer, _ in (END_TO_END | WHILE_BUILT).values()]
    (folder / "cases.json").write_text(json.dumps([*cases, STOCK]))
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    one_rank["MASTER_PORT"] = str(free_port())
    run = warm.start(folder / "initialize.py", folder / "cases.json", folder=folder, **one_rank)
    assert run.end() == 0, run.log
    lines = [line.split(" ", 1)[1] for line in run.log.splitlines() if line.startswith("OUTCOME ")]
    return dict(zip([*END_TO_END, *WHILE_BUILT, "stock"], map(json.loads, lines), strict=True))


@pytest.mark.parametrize("case", END_TO_END)
def test_initialize_refuses_before_it_touches_the_model(outcomes, case):
    kind, message, partitioned = outcomes[case]
    assert kind == "SlideConfigError"
    assert re.match(re.escape(END_TO_END[case][2]), message), message
    assert not partitioned


@pytest.mark.parametrize("case", WHILE_BUILT)
def test_initialize_refuses_what_the_machine_or_the_model_cannot_do(outcomes, case):
    kind, message, _ = outcomes[case]
    assert kind in ("SlideError", "SlideConfigError", "DoesNotFit")
    assert re.match(re.escape(WHILE_BUILT[case][2]), message), message
    assert "\n" not in message


def test_a_stock_engine_after_refusals(outcomes):
    kind, _, partitioned = outcomes["stock"]
    assert kind == "DeepSpeedZeroOptimizer_Stage3"
    assert partitioned
