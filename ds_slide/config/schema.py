"""SlideConfig: every setting of the "ds_slide" block, with its range and its default.

A wrong value is reported by its JSON path and what was expected there; an unknown key by the nearest valid one.
"""

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import ErrorDetails

from ds_slide.config.sizes import SIZE_HELP, parse_bytes
from ds_slide.errors import SlideConfigError

CONFIG_KEY = "ds_slide"
"""Top-level key of the DeepSpeed JSON; stock DeepSpeed ignores it."""


def _size_or_none(value: Any, info: ValidationInfo) -> int | None:
    # "auto" is what people write next to Hugging Face's own "auto" values; here it has one possible meaning.
    return None if value is None or value == "auto" else parse_bytes(value, f"{CONFIG_KEY}.{info.field_name}")


def _size_or_auto(value: Any, info: ValidationInfo) -> int | str:
    return "auto" if value == "auto" else parse_bytes(value, f"{CONFIG_KEY}.{info.field_name}")


def _one_or_many(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Budget = Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_size_or_none)]
StateBudget = Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_size_or_none)]
AutoSize = Annotated[int | Literal["auto"], BeforeValidator(_size_or_auto)]
CoreNumber = Annotated[StrictInt, Field(ge=0)]
Path = Annotated[StrictStr, Field(min_length=1)]
Paths = Annotated[Annotated[tuple[Path, ...], Field(min_length=1)] | None, BeforeValidator(_one_or_many)]
ModulePath = Annotated[StrictStr, Field(min_length=1)]
KernelKind = Literal["loss", "norm", "rope", "mlp"]


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False)


class DebugConfig(_Block):
    """Switches for tests of DS-Slide itself; they cost speed and never change a result."""

    lane_delay_ms: float = Field(
        default=0.0, ge=0, allow_inf_nan=False, strict=True, description="a number of milliseconds, 0 or more"
    )
    """Longest random delay put before every operation of every lane, to bring races out; 0 switches it off."""

    seed: StrictInt = Field(default=0, ge=0, description="an integer of 0 or more")
    """Seed of those delays."""


class SlideConfig(_Block):
    """The "ds_slide" block. Sizes are stored in bytes, lists as tuples."""

    enabled: StrictBool = Field(default=False, description="true or false")
    """Whether DS-Slide replaces DeepSpeed's ZeRO-3 optimizer; false leaves stock DeepSpeed."""

    window: Literal["auto"] | Annotated[StrictInt, Field(ge=2)] = Field(
        default="auto", description='"auto" or an integer of at least 2'
    )
    """Number of GPU slots, one block each: one that computes and at least one that is filled meanwhile.

    "auto" is 3, and as many more as fit into 10 % of the GPU: a block that is still in its slot is not fetched again,
    neither in backward nor in the other micro-batches of a step.
    """

    gpu_memory: Budget = Field(default=None, description=f"{SIZE_HELP}, above 0, or null for what is free")
    """Limit in bytes of everything that DS-Slide itself places on the GPU; None: what is free."""

    host_memory: StateBudget = Field(default=None, description=f"{SIZE_HELP}, 0, or null for what is free")
    """Limit in bytes of the states in host memory; None: what is free. With an SSD tier, the rest goes there, block by
    block; 0 puts there every state that may go. Held gradients and staging buffers come on top of it.
    """

    nvme_path: Paths = Field(default=None, description="a directory, a list of directories on different disks, or null")
    """Directories of the SSD tier; several are striped, in proportion to their measured bandwidths.

    None: DeepSpeed's own `zero_optimization.offload_optimizer.nvme_path` or `offload_param.nvme_path`.
    """

    state_dtype: Literal["fp32", "bf16", "8bit"] = Field(default="fp32", description='"fp32", "bf16" or "8bit"')
    """Storage of the two moments of AdamW: exact fp32; bf16 with stochastic rounding; 8 bits with a scale per 64.

    The weights' masters stay exact. The two short formats save 4 and nearly 6 of 12 bytes a parameter, in memory and
    on SSD; they are updated on the CPU, so they exclude `gpu_states`.
    """

    ssd_buffers: Literal["auto"] | Annotated[StrictInt, Field(ge=2)] = Field(
        default="auto", description='"auto" or an integer of at least 2'
    )
    """Host buffers through which optimizer states pass on their way from SSD to the update and back, of 8 Mi parameters
    each (80 MiB in fp32); "auto": as many as keep a fast disk busy, at most 16.
    """

    weight_buffers: Literal["auto"] | Annotated[StrictInt, Field(ge=2)] = Field(
        default="auto", description='"auto" or an integer of at least 2'
    )
    """Host buffers of one block's weights each, used where weights live on SSD.

    "auto": 7, or 4 more than a `window` that is given.
    """

    io_backend: Literal["auto", "io_uring", "libaio", "threads"] = Field(
        default="auto", description='"auto", "io_uring", "libaio" or "threads"'
    )
    """How the SSD is read and written; "auto" takes the first that works on this machine."""

    checksums: StrictBool = Field(default=True, description="true or false")
    """Whether what is read from SSD is compared with what was written there, by a CRC32C of every 4 KiB in host memory.

    Bytes that the disk or another program has changed end the run with their file and offset; without checksums they
    become wrong losses. 4 bytes of host memory for 4 KiB on SSD.
    """

    gpu_states: AutoSize = Field(default="auto", description=f'"auto", 0 or {SIZE_HELP}')
    """GPU memory in bytes for optimizer states: edges first, then the first blocks, which are then updated on the GPU.

    0 keeps all states in host memory; "auto" takes 5 % of the GPU, as far as the GPU budget leaves that.
    """

    share_weights: Literal["auto"] | StrictBool = Field(default="auto", description='"auto", true or false')
    """Whether the ranks of one machine read each other's weights in host memory, so that each uploads whole units.

    Otherwise each uploads its part, and the parts are gathered over the process group: more work on the GPU, but fewer
    bytes through a host link that several GPUs share. So it is anyway for weights on SSD, for units that are updated on
    the GPU, and, under "auto", for all where the ranks are on several machines; true refuses such a run.
    """

    hold_gradients: Literal["auto"] | StrictBool = Field(default="auto", description='"auto", true or false')
    """Whether gradients wait in host memory until backward has ended.

    "auto" holds them when gradient clipping, fp16 or gradient accumulation need that; otherwise a block is updated as
    soon as its gradient has arrived.
    """

    gradient_buffers: StrictInt = Field(default=4, ge=2, description="an integer of at least 2")
    """Host staging buffers of one block each, used when gradients are not held."""

    cpu_threads: Literal["auto"] | Annotated[StrictInt, Field(ge=1)] = Field(
        default="auto", description='"auto" or an integer of at least 1'
    )
    """Threads of the CPU update on this rank; "auto": the cores this process may use, shared between local ranks."""

    cpu_cores: Literal["auto", "none"] | Annotated[tuple[CoreNumber, ...], Field(min_length=1)] = Field(
        default="auto", description='"auto", "none" or a list of core numbers such as [0, 1, 2, 3]'
    )
    """Cores that the update threads are pinned to; "none" does not pin."""

    blocks: Literal["auto"] | Annotated[tuple[ModulePath, ...], Field(min_length=1)] = Field(
        default="auto", description='"auto" or a list of module paths such as ["model.layers"]'
    )
    """Module paths of the layer lists whose elements are streamed as blocks; "auto" finds them."""

    stream_head: StrictBool = Field(default=False, description="true or false")
    """Whether the weight of the language model head stays in host memory, and its rows pass through the GPU in chunks.

    Of a head of 152,064 x 8,192 the GPU then holds buffers of 0.2 GB instead of 7.5 GB (weight, gradient, and the fp32
    sum of that in the loss), and an fp32 sum of the loss's input gradient. The kernel of the loss computes the logits a
    second time in backward: four products for three, and as many transfers under them. For one rank, and a head that
    shares its weight with nothing; where gradients are not held, one that is used once in a backward.
    """

    huge_pages: StrictBool = Field(default=False, description="true or false")
    """Whether host slabs ask the kernel for transparent huge pages."""

    kernels: Literal["auto", "off"] | Annotated[tuple[KernelKind, ...], Field(min_length=1)] = Field(
        default="auto", description='"auto", "off" or a list out of "loss", "norm", "rope" and "mlp"'
    )
    """Which parts of the model are computed by Triton kernels: the loss from the head's input (the logits are then made
    only if something reads them), norms, rotary embeddings, gated feed-forwards. Each module is replaced only where a
    probe shows that the kernel computes the same; results differ by rounding.

    "auto": all of them on a GPU with Triton, none elsewhere. A list needs a GPU.
    """

    async_save: StrictBool = Field(default=False, description="true or false")
    """Whether `save_checkpoint` returns when the states have been copied in host memory, and a thread writes the copy.

    Where the copy does not fit what is free, saving waits for the end of the write, as it does without this option.
    """

    hang_timeout: float = Field(
        default=300.0, ge=0, allow_inf_nan=False, strict=True, description="a number of seconds, 0 or more"
    )
    """Seconds after which a run is ended that stands still while nothing comes forward on any rank: no transfer, no
    request of the disk, no update, no work of the GPU. The message says who waits for what. 0 switches this off.
    """

    debug: DebugConfig = Field(default_factory=lambda: DebugConfig(), description="an object")
    """Switches for race tests."""

    @classmethod
    def from_deepspeed(cls, ds_config: Mapping[str, Any]) -> "SlideConfig | None":
        """Read the block from a DeepSpeed config dict; None when the key is absent or `enabled` is false.

        Raises SlideConfigError for an unknown key or a value of the wrong type or range. `"enabled": false` skips
        these checks: off means off.
        """
        if CONFIG_KEY not in ds_config:
            return None
        block = ds_config[CONFIG_KEY]
        if not isinstance(block, Mapping):
            raise SlideConfigError(f'{CONFIG_KEY} is {block!r}; expected an object such as {{"enabled": true}}')
        if block.get("enabled") is False:
            return None
        try:
            config = cls.model_validate(dict(block))
        except ValidationError as error:
            # The first complaint only: the others mostly follow from it, and a message is one sentence.
            raise SlideConfigError(_sentence(error.errors(include_url=False)[0], block)) from None
        return config if config.enabled else None


def _sentence(error: ErrorDetails, block: Mapping[str, Any]) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"])
    # error["loc"] is key after key, then names of union branches and list positions, which say nothing to the user.
    model: type[BaseModel] = SlideConfig
    path, value = CONFIG_KEY, block
    for key in map(str, error["loc"]):
        if key not in model.model_fields:
            return _unknown_key(path, key, model)
        field, path, value = model.model_fields[key], f"{path}.{key}", value[key]
        if field.annotation is not DebugConfig or not isinstance(value, Mapping):
            break
        model = DebugConfig
    return f"{path} is {json.dumps(value, default=repr)}; expected {field.description}"


def _unknown_key(path: str, key: str, model: type[BaseModel]) -> str:
    near = difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.5)
    if near:
        return f"{path}.{key} is not a setting of DS-Slide; did you mean {path}.{near[0]}?"
    return f"{path}.{key} is not a setting of DS-Slide; the settings of {path} are {', '.join(model.model_fields)}"
