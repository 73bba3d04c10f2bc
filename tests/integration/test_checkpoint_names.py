"""The keys of DeepSpeed's checkpoint files that DS-Slide spells out are those of the DeepSpeed that is installed."""

from deepspeed.checkpoint import constants

from ds_slide.checkpoint import universal


def test_every_key_is_deepspeeds():
    ours = {name: getattr(universal, name) for name in ("OPTIMIZER_STATE_DICT", "PARAM")}
    assert ours
    assert ours == {name: getattr(constants, name) for name in ours}
