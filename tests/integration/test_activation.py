"""Activation in real processes: the entry point, the import, the launcher, and their absence."""

import json
import os
import subprocess
import sys
import textwrap
from importlib import metadata
from pathlib import Path

import pytest
from ports import free_port

REPOSITORY = Path(__file__).resolve().parents[2]
ENTRY_POINT = ("ds_slide", "ds_slide._autoload:install_hook")

# Prints what the engine's optimizer is. It does not name DS-Slide; neither does anything that it imports by name.
TRAIN = textwrap.dedent(
    """
    import argparse, json, sys
    import deepspeed
    import torch
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int)
    parser.add_argument("--note")
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
STOCK = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"
SLIDE = "ds_slide.integration.optimizer.SlideZeroOptimizer"


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


def config_file(folder, slide, stage=3):
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }
    if slide is not None:
        config["ds_slide"] = slide
    path = folder / "ds.json"
    path.write_text(json.dumps(config))
    return path


def run(command, pythonpath, **variables):
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("DS_SLIDE", "TORCH_DEVICE_"))
    }
    environment = inherited | {"DS_ACCELERATOR": "cpu", "PYTHONPATH": pythonpath} | variables
    return subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def report(result):
    lines = [line for line in result.stdout.splitlines() if line.startswith("REPORT ")]
    assert len(lines) == 1, f"exit status {result.returncode}\n{result.stdout}\n{result.stderr}"
    return json.loads(lines[0].removeprefix("REPORT "))


def launch(arguments, pythonpath, **variables):
    launcher = Path(sys.executable).with_name("deepspeed")
    options = ["--num_gpus", "1", "--master_port", str(free_port())]
    return run([launcher, *options, *arguments], pythonpath, **variables)


def run_alone(arguments, pythonpath, **variables):
    one_rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    return run([sys.executable, *arguments], pythonpath, **one_rank, MASTER_PORT=str(free_port()), **variables)


class TestEngines:
    """Which optimizer an engine gets."""

    def test_the_stock_launcher_with_the_key_and_nothing_else(self, installed, script, tmp_path):
        config = config_file(tmp_path, {"enabled": True})
        found = report(launch([script, "--deepspeed_config", config], installed))
        assert found["optimizer"] == SLIDE
        assert found["local_rank"] == 0

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

    @pytest.mark.parametrize("slide", [None, {"enabled": False, "window": "broken"}])
    def test_off_is_stock(self, installed, script, tmp_path, slide):
        found = report(run_alone([script, "--deepspeed_config", config_file(tmp_path, slide)], installed))
        assert found["optimizer"] == STOCK
        assert found["is_stock"]
        engine_modules = ("ds_slide.integration.optimizer", "ds_slide.runtime", "ds_slide.integration.selfcheck")
        assert not [name for name in found["slide_modules"] if name.startswith(engine_modules)]

    def test_the_swap_lasts_for_one_construction(self, installed, tmp_path):
        """One process, four engines: stock, DS-Slide that fails while it is built, DS-Slide, stock."""
        script = tmp_path / "engines.py"
        script.write_text(ENGINES)
        on = json.loads(config_file(tmp_path, {"enabled": True}).read_text())
        off = json.loads(config_file(tmp_path, None).read_text())
        cases = json.dumps([(off, "AdamW"), (on, "SGD"), (on, "AdamW"), (off, "AdamW")])
        result = run_alone([script, cases], installed)
        assert [line for line in result.stdout.splitlines() if line.startswith("ENGINE ")] == [
            "ENGINE DeepSpeedZeroOptimizer_Stage3",
            # From the constructor of the optimizer: only there is it known what the script's callable makes.
            "ENGINE SlideConfigError the optimizer is torch.optim.sgd.SGD, but",
            "ENGINE SlideZeroOptimizer",
            "ENGINE DeepSpeedZeroOptimizer_Stage3",
        ], result.stderr

    @pytest.mark.parametrize(
        ("damage", "refusal"),
        [
            (
                "from deepspeed.runtime.zero import stage3; del stage3.DeepSpeedZeroOptimizer_Stage3._update_scale",
                "ENGINE SlideError",
            ),
            ("import sys; sys.modules['ds_slide._native'] = None", "ENGINE SlideError the C++ extension"),
        ],
        ids=["DeepSpeed has changed", "extension not built"],
    )
    def test_what_does_not_fit_stops_only_engines_that_want_it(self, installed, tmp_path, damage, refusal):
        script = tmp_path / "engines.py"
        script.write_text(damage + "\n" + ENGINES)
        on = json.loads(config_file(tmp_path, {"enabled": True}).read_text())
        off = json.loads(config_file(tmp_path, None).read_text())
        result = run_alone([script, json.dumps([(off, "AdamW"), (on, "AdamW")])], installed)
        first, second = [line for line in result.stdout.splitlines() if line.startswith("ENGINE ")]
        assert first == "ENGINE DeepSpeedZeroOptimizer_Stage3"
        assert second.startswith(refusal)

    def test_the_environment_keeps_it_out_altogether(self, installed, script, tmp_path):
        config = config_file(tmp_path, {"enabled": True})
        found = report(run_alone([script, "--deepspeed_config", config], installed, DS_SLIDE_DISABLE="1"))
        assert found["optimizer"] == STOCK
        assert not found["wrapped"]
        assert not [name for name in found["slide_modules"] if name.startswith("ds_slide.integration")]

    def test_a_refusal_ends_the_run(self, installed, script, tmp_path):
        config = config_file(tmp_path, {"enabled": True}, stage=2)
        result = launch([script, "--deepspeed_config", config], installed)
        assert result.returncode != 0
        assert "SlideConfigError: zero_optimization.stage is 2, but DS-Slide is an engine for stage 3" in result.stderr

    def test_a_misspelt_key_is_pointed_out(self, installed, script, tmp_path):
        config = config_file(tmp_path, None)
        config.write_text(json.dumps({**json.loads(config.read_text()), "ds-slide": {"enabled": True}}))
        result = run_alone([script, "--deepspeed_config", config], installed)
        assert report(result)["is_stock"]
        assert "the config has the key 'ds-slide', which DeepSpeed ignores; was ds_slide meant?" in result.stderr


class TestHook:
    """When the engine class is wrapped, by the order of imports; no engine is built."""

    @pytest.mark.parametrize(
        ("imports", "with_metadata"),
        [
            ("import torch, deepspeed", True),
            ("import deepspeed", True),
            ("import transformers.integrations.deepspeed, deepspeed", True),
            ("import ds_slide, deepspeed", False),
            ("import deepspeed, ds_slide", False),
            ("import torch, ds_slide, deepspeed", False),
            ("import deepspeed, ds_slide, importlib; importlib.reload(ds_slide)", True),
        ],
    )
    def test_every_order_of_imports(self, installed, imports, with_metadata):
        check = textwrap.dedent(
            f"""
            {imports}
            import inspect, sys
            from deepspeed.runtime.engine import DeepSpeedEngine
            chosen = DeepSpeedEngine._configure_zero_optimizer
            assert hasattr(chosen, "__wrapped__") and not hasattr(chosen.__wrapped__, "__wrapped__"), "not wrapped once"
            assert hasattr(DeepSpeedEngine.__init__, "__wrapped__")
            assert list(inspect.signature(DeepSpeedEngine.__init__).parameters)[:3] == ["self", "args", "model"]
            assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("ds_slide")]
            import deepspeed.runtime.engine as engine
            assert type(engine.__loader__).__name__ == "SourceFileLoader" and inspect.getsource(engine)
            """
        )
        autoload = {} if with_metadata else {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        path = installed if with_metadata else str(REPOSITORY)
        result = run([sys.executable, "-c", check], path, **autoload)
        assert result.returncode == 0, result.stderr

    def test_import_torch_loads_next_to_nothing(self, installed):
        check = textwrap.dedent(
            """
            import sys
            import torch
            ours = sorted(name for name in sys.modules if name.startswith("ds_slide"))
            assert ours == ["ds_slide", "ds_slide._autoload"], ours
            assert "pydantic" not in sys.modules and "deepspeed" not in sys.modules
            assert type(sys.meta_path[0]).__module__ == "ds_slide._autoload"
            """
        )
        result = run([sys.executable, "-c", check], installed)
        assert result.returncode == 0, result.stderr

    def test_import_of_the_package_loads_no_torch(self):
        check = "import sys, ds_slide; assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
        result = run([sys.executable, "-c", check], str(REPOSITORY))
        assert result.returncode == 0, result.stderr

    def test_a_fault_of_ours_never_breaks_deepspeed(self, installed):
        """With activation.py broken, deepspeed imports, stock, and says that DS-Slide is not active."""
        check = textwrap.dedent(
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
        result = run([sys.executable, "-c", check], installed)
        assert result.returncode == 0, result.stderr

    def test_the_entry_point_is_in_the_metadata(self, installed):
        check = "from importlib.metadata import entry_points; print(list(entry_points(group='torch.backends')))"
        result = run([sys.executable, "-c", check], installed)
        assert ENTRY_POINT[1] in result.stdout


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
