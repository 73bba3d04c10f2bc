"""The check of DeepSpeed's private names, against the installed DeepSpeed."""

import ast
from pathlib import Path

import deepspeed
import pytest
from deepspeed.checkpoint import constants

import ds_slide.integration.selfcheck as selfcheck
from ds_slide.checkpoint import universal
from ds_slide.errors import SlideError
from ds_slide.integration.selfcheck import SYMBOLS, Symbol, check_deepspeed, faults

INTEGRATION = Path(selfcheck.__file__).parent


def test_the_installed_deepspeed_passes():
    assert faults(SYMBOLS) == []
    check_deepspeed()


def test_symbols_are_listed_once():
    assert len({str(symbol) for symbol in SYMBOLS}) == len(SYMBOLS)


@pytest.mark.parametrize(
    ("symbol", "fault"),
    [
        (Symbol("deepspeed.runtime.no_such_module", "Thing"), "deepspeed.runtime.no_such_module.Thing is missing"),
        (
            Symbol("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3.no_such_method"),
            "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.no_such_method is missing",
        ),
        (
            Symbol("deepspeed.runtime.engine", "DeepSpeedEngine._configure_zero_optimizer", "self inner"),
            "deepspeed.runtime.engine.DeepSpeedEngine._configure_zero_optimizer takes (self, optimizer) instead of "
            "(self, inner, ...)",
        ),
        (
            Symbol("deepspeed.runtime.engine", "DeepSpeedEngine.__init__", "self args", "config_class plan"),
            "deepspeed.runtime.engine.DeepSpeedEngine.__init__ has no parameter plan",
        ),
        # step is decorated with instrument_w_nvtx, which hides its signature.
        (
            Symbol("deepspeed.runtime.zero.stage3", "DeepSpeedZeroOptimizer_Stage3.step", "self how"),
            "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3.step takes (self, closure) instead of "
            "(self, how, ...)",
        ),
    ],
    ids=["module", "name", "parameters", "anywhere", "nvtx"],
)
def test_a_fault_is_described(symbol, fault):
    assert faults([symbol]) == [fault]


def test_a_changed_deepspeed_is_refused_with_every_fault(monkeypatch):
    changed = (*SYMBOLS, Symbol("deepspeed", "one_gone"), Symbol("deepspeed", "initialize", "model"))
    monkeypatch.setattr(selfcheck, "SYMBOLS", changed)
    with pytest.raises(SlideError) as caught:
        check_deepspeed()
    message = str(caught.value)
    assert "DeepSpeed >=0.19.5,<0.20 and tested with 0.19.8, but " in message
    assert f"{deepspeed.__version__} is installed: deepspeed.one_gone is missing, deepspeed.initialize takes" in message
    assert message.endswith("; run pip install deepspeed==0.19.8 or set ds_slide.enabled to false")


@pytest.mark.parametrize(
    ("major", "minor", "accepted"), [(0, 18, False), (0, 19, True), (0, 20, False), (1, 19, False)]
)
def test_the_version_range(monkeypatch, major, minor, accepted):
    monkeypatch.setattr(deepspeed, "__version_major__", major)
    monkeypatch.setattr(deepspeed, "__version_minor__", minor)
    monkeypatch.setattr(deepspeed, "__version__", f"{major}.{minor}.3")
    if accepted:
        check_deepspeed()
    else:
        with pytest.raises(SlideError, match=rf">=0\.19\.5,<0\.20 .* but {major}\.{minor}\.3 is installed; run pip"):
            check_deepspeed()


def test_every_private_module_that_is_imported_is_in_the_table():
    """Public are `deepspeed`, `deepspeed.comm` and `deepspeed.accelerator`; all else is private and must be checked."""
    listed = {(symbol.module, symbol.path.partition(".")[0]) for symbol in SYMBOLS}
    modules = {module for module, _ in listed}
    for file in sorted(INTEGRATION.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                used = {alias.name for alias in node.names if alias.name.startswith("deepspeed.")}
                assert used <= modules | {"deepspeed.comm", "deepspeed.accelerator"}, f"{file.name}: {used}"
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deepspeed."):
                if node.module in ("deepspeed.comm", "deepspeed.accelerator", "deepspeed.utils"):
                    continue
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    assert (node.module, alias.name) in listed or whole in modules, f"{file.name} imports {whole}"


def test_every_override_of_a_deepspeed_method_is_in_the_table():
    """A method that DeepSpeed renames would leave the override behind, uncalled."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    from ds_slide.integration.optimizer import SlideZeroOptimizer

    listed = {symbol.path for symbol in SYMBOLS}
    ours = [kind for kind in SlideZeroOptimizer.__mro__ if kind.__module__.startswith("ds_slide.")]
    assert len(ours) == 3
    for name, value in (item for kind in ours for item in vars(kind).items()):
        if callable(value) and hasattr(DeepSpeedZeroOptimizer_Stage3, name):
            assert f"DeepSpeedZeroOptimizer_Stage3.{name}" in listed


def test_every_key_of_a_checkpoint_is_deepspeeds():
    ours = {name: getattr(universal, name) for name in ("OPTIMIZER_STATE_DICT", "PARAM")}
    assert ours == {name: getattr(constants, name) for name in ours}
