"""Activation in real processes: the entry point, the import, the launcher, and their absence.

Every case needs a process that has imported neither torch nor DeepSpeed in any other way than its own. Those whose
imports begin alike are forks of one process (activation_forks.py), which has made these imports and nothing else.
"""

import json
import os
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
from forking import ONE_THREAD
from ports import free_port

TESTS = Path(__file__).resolve().parents[1]
REPOSITORY = TESTS.parent
ENTRY_POINT = ("ds_slide", "ds_slide._autoload:install_hook")

# Prints what the engine's optimizer is. It does not name DS-Slide; neither does anything that it imports by name.
# `--then`: the config of another engine.
TRAIN = textwrap.dedent(
    """
    import argparse, json, sys
    import deepspeed
    import torch
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--note")
    parser.add_argument("--then")
    deepspeed.add_config_arguments(parser)
    arguments = parser.parse_args()
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    engine, optimizer, *_ = deepspeed.initialize(args=arguments, model=model, model_parameters=model.parameters())
    kind = type(optimizer)
    from deepspeed.runtime.zero import stage3
    print("REPORT", json.dumps({
        "optimizer": f"{kind.__module__}.{kind.__qualname__}",
        "is_stock": kind is stage3.DeepSpeedZeroOptimizer_Stage3,
        "local_rank": arguments.local_rank,
        "note": arguments.note,
        "argv0": sys.argv[0],
        "path0": sys.path[0],
        "main_file": sys.modules["__main__"].__dict__.get("__file__"),
        "slide_modules": sorted(name for name in sys.modules if name.startswith("ds_slide")),
        "wrapped": hasattr(deepspeed.DeepSpeedEngine._configure_zero_optimizer, "__wrapped__"),
    }), flush=True)
    engine.destroy()
    if arguments.then:
        deepspeed.initialize(model=model, config=arguments.then, model_parameters=model.parameters())
    """
)
ENGINES = textwrap.dedent(
    """
    import json, sys
    import deepspeed
    import torch
    deepspeed.init_distributed("gloo")
    for config, kind in json.loads(sys.argv[1]):
        del config["optimizer"]
        config["zero_allow_untested_optimizer"] = True
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
        make = lambda parameters: getattr(torch.optim, kind)(parameters, lr=1e-3)
        try:
            engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=make)
            print("ENGINE", type(engine.optimizer).__name__, flush=True)
            engine.destroy()
        except Exception as error:
            print("ENGINE", type(error).__name__, str(error).partition(" DS-Slide")[0], flush=True)
    """
)
# No case asks about these: what every engine imports, and the CPU.
WARM = textwrap.dedent(
    """
    import forking, torch._dynamo
    import deepspeed.runtime.zero.muon.muon_optimizer
    forking.ask_cpu_once()
    """
)
STOCK = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
SLIDE = "ds_slide.integration.optimizer.SlideZeroOptimizer"

# ---- where the package is found ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A PYTHONPATH on which the package is importable and its metadata is found, as after `pip install`.

    Where the package is installed that is how it is; in a bare checkout the metadata is made from pyproject.toml.
    """
    folders = [str(REPOSITORY)]
    if not _entry_points():
        folder = tmp_path_factory.mktemp("metadata")
        command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(folder)]
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, timeout=120)
        folders.append(str(folder))
    return os.pathsep.join(folders)


def _entry_points():
    return [
        entry for entry in metadata.entry_points(group="torch.backends") if (entry.name, entry.value) == ENTRY_POINT
    ]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("script") / "train.py"
    path.write_text(TRAIN)
    return path


# ---- configs -------------------------------------------------------------------------------------------------------


def config_of(slide, stage=3, **others):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **others,
    }
    if slide is not None:
        config["ds_slide"] = slide
    return config


def config_file(folder, slide, stage=3, **others):
    path = folder / f"stage{stage}.json"
    path.write_text(json.dumps(config_of(slide, stage, **others)))
    return path


# ---- processes -----------------------------------------------------------------------------------------------------


def run(command, pythonpath, stdin="", **variables):
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("DS_SLIDE", "TORCH_DEVICE_"))
    }
    environment = inherited | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": pythonpath} | variables
    return subprocess.run(
        list(map(str, command)), env=environment, input=stdin, capture_output=True, text=True, timeout=200, check=False
    )


def report(result):
    lines = [line for line in result.stdout.splitlines() if line.startswith("REPORT ")]
    assert len(lines) == 1, f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return json.loads(lines[0].removeprefix("REPORT "))


def launch(arguments, pythonpath, **variables):
    launcher = Path(sys.executable).with_name("deepspeed")
    options = ["--num_gpus", "1", "--master_port", str(free_port())]
    return run([launcher, *options, *arguments], pythonpath, **variables)


def case(code, *arguments, **variables):
    """A fork: what it runs, as a script of one rank, and changes of its environment."""
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    variables = {**one_rank, "MASTER_PORT": str(free_port()), **variables}
    return {"code": code, "arguments": list(map(str, arguments)), "variables": variables}


def forks(folder, pythonpath, *stages, **variables):
    """How each case ended. `stages`: (statements, {name: case}); the statements go on from those of the last stage."""
    numbered, files = [], {}
    for statements, cases in stages:
        files |= {name: len(files) + number for number, name in enumerate(cases)}
        numbered.append((statements, {files[name]: of for name, of in cases.items()}))
    command = [sys.executable, TESTS / "support" / "activation_forks.py", folder]
    whole = run(command, pythonpath, json.dumps(numbered), **ONE_THREAD, **variables)

    def ended(name):
        status, *streams = (folder / f"{files[name]}.{ending}" for ending in ("status", "out", "err"))
        assert status.exists(), f"not started\n{whole.stdout}\n{whole.stderr}"
        return subprocess.CompletedProcess(name, int(status.read_text()), *(stream.read_text() for stream in streams))

    return ended


# ---- the cases that share imports ----------------------------------------------------------------------------------

FIRST_TORCH = "import torch, deepspeed"
# Imports, the fixture in whose process they go on, and what that has imported before the fork.
ORDERS = [
    (FIRST_TORCH, "with_metadata", "import torch"),
    ("import deepspeed", "with_deepspeed", "import deepspeed"),
    ("import transformers.integrations.deepspeed, deepspeed", "with_metadata", ""),
    ("import ds_slide, deepspeed", "without_metadata", ""),
    ("import deepspeed, ds_slide", "without_metadata", "import torch"),
    ("import torch, ds_slide, deepspeed", "slow_without_metadata", "import torch"),
    ("import deepspeed, ds_slide, importlib; importlib.reload(ds_slide)", "with_deepspeed", "import deepspeed"),
]
IS_WRAPPED = textwrap.dedent(
    """
    import inspect, sys
    from deepspeed.runtime.engine import DeepSpeedEngine
    chosen = DeepSpeedEngine._configure_zero_optimizer
    assert hasattr(chosen, "__wrapped__") and not hasattr(chosen.__wrapped__, "__wrapped__"), "not wrapped once"
    assert hasattr(DeepSpeedEngine.__init__, "__wrapped__")
    assert list(inspect.signature(DeepSpeedEngine.__init__).parameters)[:3] == ["self", "args", "model"]
    import accelerate.utils.deepspeed as hf
    assert hasattr(hf.HfDeepSpeedConfig.__init__, "__wrapped__")
    assert not hasattr(hf.HfDeepSpeedConfig.__init__.__wrapped__, "__wrapped__"), "not wrapped once"
    assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("ds_slide")]
    import deepspeed.runtime.engine as engine
    assert type(engine.__loader__).__name__ == "SourceFileLoader" and inspect.getsource(engine)
    """
)
TORCH_LOADS_LITTLE = textwrap.dedent(
    """
    import sys
    import torch
    ours = sorted(name for name in sys.modules if name.startswith("ds_slide"))
    assert ours == ["ds_slide", "ds_slide._autoload"], ours
    assert "pydantic" not in sys.modules and "deepspeed" not in sys.modules
    assert type(sys.meta_path[0]).__module__ == "ds_slide._autoload"
    """
)
LOADS_NO_TORCH = "import sys, ds_slide; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
WITHOUT_EXTENSION = "import sys; sys.modules['ds_slide._native'] = None"
BROKEN_ACTIVATION = textwrap.dedent(
    """
    import sys, warnings
    sys.modules["ds_slide.integration.activation"] = None  # its import raises ImportError
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import deepspeed
    assert not hasattr(deepspeed.DeepSpeedEngine._configure_zero_optimizer, "__wrapped__")
    ours = [str(warning.message) for warning in caught if "DS-Slide" in str(warning.message)]
    assert len(ours) == 1 and ours[0].startswith("DS-Slide is not active in this process: "), ours
    """
)
PRINT_ENTRY_POINTS = "from importlib.metadata import entry_points; print(list(entry_points(group='torch.backends')))"
KEPT_OUT = textwrap.dedent(
    """
    import sys
    import deepspeed
    assert not hasattr(deepspeed.DeepSpeedEngine._configure_zero_optimizer, "__wrapped__")
    assert not hasattr(deepspeed.DeepSpeedEngine.__init__, "__wrapped__")
    assert not [name for name in sys.modules if name.startswith("ds_slide.integration")]
    """
)
# Of a config that lacks the key, or has another one, and of one that has it.
OFF = {
    "misspelt": {"ds-slide": {"enabled": True}},
    "not enabled": {"ds_slide": {"enabled": False, "window": "broken"}},
}
# What does not fit, and how the error of the engine that wants it begins.
DAMAGES = {
    "DeepSpeed has changed": (
        "from deepspeed.runtime.zero import stage3; del stage3.DeepSpeedZeroOptimizer_Stage3._update_scale",
        "ENGINE SlideError",
    ),
    "extension not built": (WITHOUT_EXTENSION, "ENGINE SlideError the C++ extension"),
}


def orders_in(process, before):
    """The orders of imports that go on from `before` there; one without the extension, which is not needed yet."""
    begin = {FIRST_TORCH: f"{WITHOUT_EXTENSION}\n"}
    return {
        imports: case(f"{begin.get(imports, '')}{imports}\n{IS_WRAPPED}")
        for imports, *place in ORDERS
        if place == [process, before]
    }


@pytest.fixture(scope="module")
def with_metadata(installed, tmp_path_factory):
    """Cases of an environment in which the package is installed."""
    folder = tmp_path_factory.mktemp("with_metadata")
    from_nothing = {
        **orders_in("with_metadata", ""),
        "entry points": case(PRINT_ENTRY_POINTS),
        "kept out": case(KEPT_OUT, DS_SLIDE_DISABLE="1"),
    }
    from_torch = {
        **orders_in("with_metadata", "import torch"),
        "torch loads little": case(TORCH_LOADS_LITTLE),
        "broken activation": case(BROKEN_ACTIVATION),
    }
    return forks(folder, installed, ("", from_nothing), ("import torch", from_torch))


@pytest.fixture(scope="module")
def with_deepspeed(installed, tmp_path_factory):
    """Cases that begin with DeepSpeed, where the package is installed."""
    folder = tmp_path_factory.mktemp("with_deepspeed")
    on, off = config_of({"enabled": True}), config_of(None)
    four = json.dumps([(off, "AdamW"), (on, "LBFGS"), (on, "AdamW"), (off, "AdamW")])
    engines = {"four engines": case(ENGINES, four)}
    for name, (damage, _) in DAMAGES.items():
        engines[name] = case(f"{damage}\n{ENGINES}", json.dumps([(off, "AdamW"), (on, "AdamW")]))
    for name, key in OFF.items():
        engines[name] = case(TRAIN, "--deepspeed_config", config_file(tmp_path_factory.mktemp("off"), None, **key))
    orders = orders_in("with_deepspeed", "import deepspeed")
    return forks(folder, installed, ("import deepspeed", orders), (WARM, engines))


@pytest.fixture(scope="module")
def without_metadata(tmp_path_factory):
    """Cases of an environment without the entry point, wherever it may come from."""
    folder = tmp_path_factory.mktemp("without_metadata")
    from_nothing = {"package": case(LOADS_NO_TORCH), **orders_in("without_metadata", "")}
    from_torch = orders_in("without_metadata", "import torch")
    stages = [("", from_nothing), ("import torch", from_torch)]
    return forks(folder, str(REPOSITORY), *stages, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.fixture(scope="module")
def slow_without_metadata(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slow_without_metadata")
    stage = ("import torch", orders_in("slow_without_metadata", "import torch"))
    return forks(folder, str(REPOSITORY), stage, TORCH_DEVICE_BACKEND_AUTOLOAD="0")


@pytest.fixture(scope="module")
def launched(installed, script, tmp_path_factory):
    """The stock launcher: an engine whose config has the key and nothing else, then one that is refused."""
    folder = tmp_path_factory.mktemp("launched")
    good, refused = (config_file(folder, {"enabled": True}, stage=stage) for stage in (3, 2))
    return launch([script, "--deepspeed_config", good, "--then", refused], installed)


class TestEngines:
    """Which optimizer an engine gets."""

    def test_the_stock_launcher_with_the_key_and_nothing_else(self, launched):
        found = report(launched)
        assert found["optimizer"] == SLIDE
        assert found["local_rank"] == 0

    def test_one_line_at_the_start_and_the_refusal_last_on_the_screen(self, launched):
        lines = launched.stderr.splitlines()
        (start,) = [line for line in lines if "[ds_slide]" in line]
        assert "] [INFO] [ds_slide] DS-Slide " in start and "4 blocks" in start
        sentence = "zero_optimization.stage is 2, but DS-Slide is an engine for stage 3; set it to 3 or remove"
        assert f"ds_slide.errors.SlideConfigError: {sentence}" in lines[-1], launched.stderr
        frames = [line for line in lines if '  File "' in line]
        assert launched.returncode != 0
        assert frames and not [line for line in frames if "train.py" not in line], launched.stderr

    @pytest.mark.slow
    def test_the_launcher_with_the_run_module_needs_no_metadata(self, script, tmp_path):
        config = config_file(tmp_path, {"enabled": True})
        arguments = ["--module", "ds_slide.run", script, "--deepspeed_config", config, "--note", "two words"]
        # Without the entry point, wherever it may come from.
        found = report(launch(arguments, str(REPOSITORY), TORCH_DEVICE_BACKEND_AUTOLOAD="0"))
        assert found["optimizer"] == SLIDE
        assert found["local_rank"] == 0
        assert found["note"] == "two words"
        assert found["argv0"] == found["main_file"] == str(script)
        assert found["path0"] == str(script.parent)

    @pytest.mark.parametrize("name", OFF)
    def test_off_is_stock(self, with_deepspeed, name):
        found = report(with_deepspeed(name))
        assert found["optimizer"] == STOCK
        assert found["is_stock"]
        engine_modules = ("ds_slide.integration.optimizer", "ds_slide.runtime", "ds_slide.integration.selfcheck")
        assert not [name for name in found["slide_modules"] if name.startswith(engine_modules)]

    def test_the_swap_lasts_for_one_construction(self, with_deepspeed):
        """One process, four engines: stock, DS-Slide that fails while it is built, DS-Slide, stock."""
        result = with_deepspeed("four engines")
        assert [line for line in result.stdout.splitlines() if line.startswith("ENGINE ")] == [
            "ENGINE DeepSpeedZeroOptimizer_Stage3",
            # From the constructor of the optimizer: only there is it known what the script's callable makes.
            "ENGINE SlideConfigError torch.optim.lbfgs.LBFGS needs a closure in step(), which computes the loss again, "
            "and ZeRO-3 has none; use another one",
            "ENGINE SlideZeroOptimizer",
            "ENGINE DeepSpeedZeroOptimizer_Stage3",
        ], result.stderr

    @pytest.mark.parametrize("damage", DAMAGES)
    def test_what_does_not_fit_stops_only_engines_that_want_it(self, with_deepspeed, damage):
        result = with_deepspeed(damage)
        first, second = [line for line in result.stdout.splitlines() if line.startswith("ENGINE ")]
        assert first == "ENGINE DeepSpeedZeroOptimizer_Stage3"
        assert second.startswith(DAMAGES[damage][1])

    def test_the_environment_keeps_it_out_altogether(self, with_metadata):
        result = with_metadata("kept out")
        assert result.returncode == 0, result.stderr

    @pytest.mark.slow
    def test_an_engine_of_an_environment_that_keeps_it_out(self, installed, script, tmp_path):
        config = config_file(tmp_path, {"enabled": True})
        found = report(launch([script, "--deepspeed_config", config], installed, DS_SLIDE_DISABLE="1"))
        assert found["optimizer"] == STOCK
        assert not found["wrapped"]
        assert not [name for name in found["slide_modules"] if name.startswith("ds_slide.integration")]

    def test_a_misspelt_key_is_pointed_out(self, with_deepspeed):
        result = with_deepspeed("misspelt")
        assert report(result)["is_stock"]
        assert "the config has the key 'ds-slide', which DeepSpeed ignores; was ds_slide meant?" in result.stderr


class TestHook:
    """When the engine class is wrapped, by the order of imports; no engine is built."""

    @pytest.mark.parametrize(
        ("imports", "process"),
        [
            pytest.param(imports, process, marks=pytest.mark.slow if process.startswith("slow") else ())
            for imports, process, _ in ORDERS
        ],
    )
    def test_every_order_of_imports(self, request, imports, process):
        result = request.getfixturevalue(process)(imports)
        assert result.returncode == 0, result.stderr

    def test_the_extension_is_not_needed_yet(self, with_metadata):
        result = with_metadata(FIRST_TORCH)
        assert result.returncode == 0, result.stderr

    def test_import_torch_loads_next_to_nothing(self, with_metadata):
        result = with_metadata("torch loads little")
        assert result.returncode == 0, result.stderr

    def test_import_of_the_package_loads_no_torch(self, without_metadata):
        result = without_metadata("package")
        assert result.returncode == 0, result.stderr

    def test_a_fault_of_ours_never_breaks_deepspeed(self, with_metadata):
        """With activation.py broken, deepspeed imports, stock, and says that DS-Slide is not active."""
        result = with_metadata("broken activation")
        assert result.returncode == 0, result.stderr

    def test_the_entry_point_is_in_the_metadata(self, with_metadata):
        assert ENTRY_POINT[1] in with_metadata("entry points").stdout


class TestRunModule:
    """ds_slide.run stands in for `python`, without DeepSpeed in the picture."""

    @pytest.fixture
    def echo(self, tmp_path):
        path = tmp_path / "echo.py"
        path.write_text("import json, sys\nprint(json.dumps([__name__, sys.argv, sys.path[0]]))\n")
        return path

    def test_a_script(self, echo, tmp_path):
        arguments = ["-m", "ds_slide.run", "--local_rank=3", echo, "--steps", "5", "--local_rank=x"]
        result = run([sys.executable, *arguments], str(REPOSITORY))
        expected = ["__main__", [str(echo), "--local_rank=3", "--steps", "5", "--local_rank=x"], str(tmp_path)]
        assert json.loads(result.stdout) == expected

    def test_a_module(self, echo, tmp_path):
        path = os.pathsep.join([str(REPOSITORY), str(tmp_path)])
        result = run([sys.executable, "-m", "ds_slide.run", "--local_rank=1", "-m", "echo", "-x"], path)
        name, argv, _ = json.loads(result.stdout)
        assert name == "__main__"
        assert argv == [str(echo), "--local_rank=1", "-x"]

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ([], "usage: "),
            (["--local_rank=0"], "usage: "),
            (["-m"], "usage: "),
            (["no.py"], "there is no file 'no.py'"),
        ],
    )
    def test_bad_arguments(self, arguments, message):
        result = run([sys.executable, "-m", "ds_slide.run", *arguments], str(REPOSITORY))
        assert result.returncode == 1
        assert message in result.stderr
