"""SlideConfig: every setting of the "ds_slide" block, with its range and its default.

A wrong value is reported by its JSON path and what was expected there; an unknown key by the nearest valid one.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
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

from ds_slide.config.old_names import refuse_moved, under_new_names
from ds_slide.config.values import SIZE_HELP, check_directory_text, parse_bytes, shown, shown_key
from ds_slide.errors import SlideConfigError

CONFIG_KEY = "ds_slide"
"""Top-level key of the DeepSpeed JSON; stock DeepSpeed ignores it."""


def _size_or_none(value: Any, info: ValidationInfo) -> int | None:
    # "auto" is what people write next to Hugging Face's own "auto" values; here it has one possible meaning.
    return None if value is None or value == "auto" else parse_bytes(value, f"{CONFIG_KEY}.{info.field_name}")


def _size_or_auto(value: Any, info: ValidationInfo) -> int | str:
    return "auto" if value == "auto" else parse_bytes(value, f"{CONFIG_KEY}.{info.field_name}")


def _directories(value: Any, info: ValidationInfo) -> Any:
    name = f"{CONFIG_KEY}.{info.field_name}"
    if isinstance(value, str):
        check_directory_text(value, name)
        return (value,)
    if isinstance(value, list | tuple) and len(value) <= MOST_DIRECTORIES:
        for number, text in enumerate(value):
            if isinstance(text, str):
                check_directory_text(text, f"{name}[{number}]")
    return value


def _limit_of_seconds(value: float) -> float:
    if 0 < value < LEAST_HANG_TIMEOUT_S:
        raise ValueError  # the field's description says what is expected
    return value


def _first_and_last(value: tuple[int, int]) -> tuple[int, int]:
    first, last = value
    if not 2 <= first <= last < first + MOST_TRACED_STEPS:
        raise ValueError  # as above
    return value


# Limits that no machine comes near. Beyond them a value is a slip of the pen, and what it asks for would be built for
# minutes, or overflow on its way to C++ or to a wait of the operating system.
MOST_BUFFERS = 4096
MOST_THREADS = 4096
LAST_CORE = 1023  # a cpu_set_t has 1,024 bits
MOST_DELAY_MS = 60_000
LEAST_HANG_TIMEOUT_S, MOST_HANG_TIMEOUT_S = 0.1, 100_000_000
# A disk that would get less than one stripe in 32 is left out (ds_slide.store.ssd.extents), so more are of no use.
MOST_DIRECTORIES = 32
MOST_TRACED_STEPS = 100  # some thousand events each, which wait in memory until the last of them has ended
_LARGEST_SEED = 2**63 - 1
# Below 16 the padding of a d x d state to whole cache lines, and a launch for it, cost more than the transfer.
LEAST_D, MOST_D, MOST_R = 16, 65_536, 16
MOST_STEPS, MOST_BIAS = 1_000_000_000, 100

Budget = Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_size_or_none)]
StateBudget = Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_size_or_none)]
AutoSize = Annotated[int | Literal["auto"], BeforeValidator(_size_or_auto)]
BufferCount = Annotated[StrictInt, Field(ge=2, le=MOST_BUFFERS)]
BUFFERS_HELP = f"an integer from 2 to {MOST_BUFFERS}"
CoreNumber = Annotated[StrictInt, Field(ge=0, le=LAST_CORE)]
Path = Annotated[StrictStr, Field(min_length=1)]
Paths = Annotated[
    Annotated[tuple[Path, ...], Field(min_length=1, max_length=MOST_DIRECTORIES)] | None, BeforeValidator(_directories)
]
ModulePath = Annotated[StrictStr, Field(min_length=1)]
KernelKind = Literal["loss", "norm", "rope", "mlp"]


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False)


class DebugConfig(_Block):
    """Switches for tests of DS-Slide itself; they cost speed and never change a result."""

    lane_delay_ms: float = Field(
        default=0.0,
        ge=0,
        le=MOST_DELAY_MS,
        allow_inf_nan=False,
        strict=True,
        description=f"a number of milliseconds from 0 to {MOST_DELAY_MS}",
    )
    """Longest random delay put before every operation of every lane, to bring races out; 0 switches it off."""

    seed: StrictInt = Field(default=0, ge=0, le=_LARGEST_SEED, description="an integer from 0 to 2^63 - 1")
    """Seed of those delays."""

    out_of_place: Literal["auto"] | StrictBool = Field(default="auto", description='"auto", true or false')
    """Whether speculative updates write to spare state buffers of their block (12 bytes a parameter, 14 of fp16), which
    become its own when the update counts; the others write an undo log beside the update in place. "auto": as far as
    half of the host memory reaches that is left, when all blocks have undo logs. True: spare state buffers first.
    False: undo logs only. Short moments, blocks that train in part and several ranks have undo logs."""

    take_back: float = Field(
        default=0.0, ge=0, le=1, allow_inf_nan=False, strict=True, description="a number from 0 to 1"
    )
    """The part of speculative updates, chosen at random, that are taken back although they would count."""


class CheckpointConfig(_Block):
    """How checkpoints are loaded."""

    require_manifest: StrictBool = Field(default=False, description="true or false")
    """Whether a checkpoint without a manifest, such as stock DeepSpeed's, is refused. A manifest tells damage; it is no
    proof of who has written the files ([what is trusted](checkpoints.md#what-is-trusted))."""


class TraceConfig(_Block):
    """A record of what every lane did in chosen steps."""

    path: Annotated[StrictStr, Field(min_length=1)] | None = Field(
        default=None, description='a file that is to be written, such as "step.json", or null'
    )
    """File for the record, a Chrome trace in JSON, which Perfetto opens and [`ds-slide trace`](tracing.md) reads; null:
    nothing is recorded. Of several ranks each writes its own: "step.rank1.json". `~` and `$NAME` mean what they mean in
    a shell.
    """

    steps: Annotated[tuple[StrictInt, StrictInt], AfterValidator(_first_and_last)] = Field(
        default=(3, 3), description=f"the first and the last of at most {MOST_TRACED_STEPS} steps, the first at least 2"
    )
    """First and last step that are recorded, counted as in `slide_stats()["step"]`; the very first step has no
    beginning, so 2 is the earliest.
    """


class CompressionConfig(_Block):
    """Gradients in learned subspaces ([compression](compression.md)). Lossy."""

    type: Literal["lsp"] = Field(description='"lsp"')
    """LSP-Offload: a matrix's gradient G goes down as P^T G Q, d x d, is updated there, and comes back as P D Q^T."""

    d: Literal["auto"] | Annotated[StrictInt, Field(ge=LEAST_D, le=MOST_D)] = Field(
        default="auto", description=f'"auto" or an integer from {LEAST_D} to {MOST_D:,}'
    )
    """Rows and columns of the subspace, of each matrix at most half of its smaller side; "auto": the most for which
    transfers and updates still fit beside the GPU's work, by the ceilings of this machine."""

    r: Annotated[StrictInt, Field(ge=1, le=MOST_R)] = Field(default=4, description=f"an integer from 1 to {MOST_R}")
    """Numbers other than zero in each row of P and Q."""

    master_dtype: Literal["auto", "fp32", "bf16"] = Field(default="auto", description='"auto", "fp32" or "bf16"')
    """Masters of the compressed matrices, on the GPU: exact fp32, bf16 weights with their low halves (4 bytes a
    parameter); or the bf16 weights alone, each update rounded stochastically (2 bytes). "auto": fp32 where that fits,
    by what the engine itself places; activations come on top of it."""

    check_every: Annotated[StrictInt, Field(ge=1, le=MOST_STEPS)] = Field(
        default=500, description=f"an integer from 1 to {MOST_STEPS:,}"
    )
    """Steps from one check of the projectors to the next; the first step is checked."""

    threshold: Annotated[float, Field(ge=0, le=MOST_BIAS, allow_inf_nan=False, strict=True)] | None = Field(
        default=None, description=f"a number from 0 to {MOST_BIAS}, or null"
    )
    """The part of a gradient, by its norm, that its way through the subspace may lose or add in a check; where it is
    more, P and Q are fitted to that gradient anew. null: they never are. Fits made the loss worse in each training that
    was compared ([page](../benchmarks/results/2026-11-24_nvidia-h100_compression-curves.md))."""

    seed: StrictInt = Field(default=0, ge=0, le=_LARGEST_SEED, description="an integer from 0 to 2^63 - 1")
    """Seed of the first P and Q, and of the bits by which bf16 masters are rounded."""


class SlideConfig(_Block):
    """The "ds_slide" block. Sizes are stored in bytes, lists as tuples."""

    enabled: StrictBool = Field(default=False, description="true or false")
    """Whether DS-Slide replaces DeepSpeed's ZeRO-3 optimizer; false leaves stock DeepSpeed."""

    window: Literal["auto"] | BufferCount = Field(default="auto", description=f'"auto" or {BUFFERS_HELP}')
    """Number of GPU slots, one block each: one that computes and at least one that is filled meanwhile.

    "auto" is 3, and as many more as fit into 10 % of the GPU and into `gpu_memory`: a block that is still in its slot
    is not fetched again, neither in backward nor in the other micro-batches of a step. Give 3 where activations need
    all of the GPU.
    """

    gpu_memory: Budget = Field(default=None, description=f"{SIZE_HELP}, above 0, or null for what is free")
    """Limit in bytes of everything that DS-Slide itself places on the GPU, activations that it keeps included; null:
    what is free."""

    host_memory: StateBudget = Field(default=None, description=f"{SIZE_HELP}, 0, or null for what is free")
    """Limit in bytes of the states in host memory; null: what is free of the machine, of the container's control groups
    and of `ulimit -v`. With an SSD tier, the rest goes there, block by block; 0 puts there every state that may go.
    Held gradients and staging buffers come on top of it; undo logs and inputs of blocks take what states leave, and
    with an SSD tier the rest of these inputs goes there, too.
    """

    nvme_path: Paths = Field(
        default=None,
        description=f"a directory, a list of at most {MOST_DIRECTORIES} directories on different disks, or null",
    )
    """Directories of the SSD tier; several are striped, in proportion to their measured bandwidths. `~` and `$NAME`
    mean what they mean in a shell.

    null: DeepSpeed's own `zero_optimization.offload_optimizer.nvme_path` or `offload_param.nvme_path`.
    """

    state_dtype: Literal["fp32", "bf16", "8bit"] = Field(default="fp32", description='"fp32", "bf16" or "8bit"')
    """Storage of the two moments of AdamW: exact fp32; bf16 with stochastic rounding; 8 bits with a scale per 64.
    Other optimizers have fp32 only.

    The weights' masters stay exact. The two short formats save 4 and nearly 6 of 12 bytes a parameter, in memory and
    on SSD; they are updated on the CPU, so they exclude `gpu_states`.
    """

    ssd_buffers: Literal["auto"] | BufferCount = Field(default="auto", description=f'"auto" or {BUFFERS_HELP}')
    """Host buffers through which optimizer states pass on their way from SSD to the update and back, of 8 Mi parameters
    each (80 MiB in fp32); "auto": as many as keep a fast disk busy, at most 16.
    """

    weight_buffers: Literal["auto"] | BufferCount = Field(default="auto", description=f'"auto" or {BUFFERS_HELP}')
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
    """GPU memory in bytes for optimizer states: outer modules first, then the first blocks, which are then updated on
    the GPU.

    0 keeps all states in host memory; "auto" takes 5 % of the GPU, as far as the GPU budget leaves that, up to
    60 % where host memory has no place for the rest and there is no SSD tier, and more once the first steps have shown
    [what is spare](budgets.md#spare-gpu-memory).
    """

    activations: Literal["auto", "whole_blocks", "as_written"] = Field(
        default="auto", description='"auto", "whole_blocks" or "as_written"'
    )
    """Which blocks are recomputed in backward. "auto": the saved tensors of a layer of transformers stay on the GPU
    where memory is left, and it is recomputed where it is not, forward by forward and with the same bits, whether the
    script has switched gradient checkpointing on or not. Where that does not suffice, inputs of recomputed blocks wait
    in host memory, and then on SSD. [What is left alone](budgets.md#spare-gpu-memory).

    With "auto" a block may also keep some results of its operators and recompute the rest; with "whole_blocks" it keeps
    all that it saves, or nothing. "as_written" recomputes what the script says, always.
    """

    update_passes: Literal["auto", 1, 2] = Field(default="auto", description='"auto", 1 or 2')
    """Passes in which the CPU does a deferred update of states in host memory: 1 under the next forward, or 2, the
    weights under the forward and the states under its backward; "auto": 2 where the updates take longer than the
    forward."""

    speculate: Literal["auto"] | StrictBool = Field(default="auto", description='"auto", true or false')
    """Whether deferred updates of blocks in host memory begin under backward, before the norm is known, as if it was
    below the limit, and are taken back where it is not. "auto": while the last four norms were below the limit and the
    updates take longer than the forward. With false no memory is set aside for the way back."""

    share_weights: Literal["auto"] | StrictBool = Field(default="auto", description='"auto", true or false')
    """Whether the ranks of one machine read each other's weights in host memory, so that each uploads whole units.

    With false each uploads its part, and the parts are gathered over the process group: more work on the GPU, but fewer
    bytes through a host link that several GPUs share. So it is anyway for weights on SSD, for units that are updated on
    the GPU, and, under "auto", for all where the ranks are on several machines; true refuses such a run.
    """

    defer_updates: Literal["auto"] | StrictBool = Field(default="auto", description='"auto", true or false')
    """Whether updates are deferred: gradients then wait in host memory until backward has ended.

    "auto" defers them when gradient clipping, fp16 or gradient accumulation need that; otherwise a block is updated as
    soon as its gradient has arrived. Its old name, `hold_gradients`, still works.
    """

    gradient_buffers: Literal["auto"] | BufferCount = Field(default="auto", description=f'"auto" or {BUFFERS_HELP}')
    """Host staging buffers of one block each, for gradients that are not held, or held on SSD; "auto": 4, and where
    updates begin as gradients arrive, one for every three blocks if host memory has room.

    Backward waits when all of them hold gradients whose updates have not ended.
    """

    cpu_threads: Literal["auto"] | Annotated[StrictInt, Field(ge=1, le=MOST_THREADS)] = Field(
        default="auto", description=f'"auto" or an integer from 1 to {MOST_THREADS}'
    )
    """Threads of the CPU update on this rank; "auto": the cores this process may use, shared between local ranks."""

    cpu_cores: Literal["auto", "none"] | Annotated[tuple[CoreNumber, ...], Field(min_length=1)] = Field(
        default="auto",
        description=f'"auto", "none" or a list of core numbers from 0 to {LAST_CORE} such as [0, 1, 2, 3]',
    )
    """Cores that the update threads are pinned to; "none" does not pin."""

    blocks: Literal["auto"] | Annotated[tuple[ModulePath, ...], Field(min_length=1)] = Field(
        default="auto", description='"auto" or a list of module paths such as ["model.layers"]'
    )
    """Module paths of what is streamed as blocks: a list or a dictionary of layers stands for its elements, another
    module for itself. Each part of a path may be a pattern: ["encoder.*.layers"], ["layer?"], ["block_*"]. "auto" finds
    layers of one class that repeat and hold a tenth of the model, in lists, in dictionaries and as attributes."""

    stream_head: StrictBool = Field(default=False, description="true or false")
    """Whether the weight of the language model head stays in host memory, and its rows pass through the GPU in chunks.

    Of a head of 152,064 x 8,192 the GPU then holds buffers of 0.2 GB instead of 7.5 GB (weight, gradient, and the fp32
    sum of that in the loss), and an fp32 sum of the loss's input gradient. The kernel of the loss computes the logits a
    second time in backward: four products for three, and as many transfers under them. For one rank, and a head that
    shares its weight with nothing; where gradients are not held, one that is used once in a backward.
    """

    huge_pages: StrictBool = Field(default=False, description="true or false")
    """Whether the states in host memory ask the kernel for transparent huge pages; the buffers of the disk always do.
    """

    kernels: Literal["auto", "off"] | Annotated[tuple[KernelKind, ...], Field(min_length=1)] = Field(
        default="auto", description='"auto", "off" or a list out of "loss", "norm", "rope" and "mlp"'
    )
    """Which parts of the model are computed by Triton kernels: the loss from the head's input (the logits are then made
    only if something reads them), norms, rotary embeddings, gated feed-forwards. Each module is replaced only where a
    probe shows that the kernel computes the same; results differ by rounding.

    "auto": all of them on a GPU with Triton, none elsewhere. A list needs a GPU.
    """

    async_save: StrictBool = Field(default=False, description="true or false")
    """Whether `save_checkpoint` returns when the states have been copied in host memory, and a thread writes the copy
    ([checkpoints](checkpoints.md#asynchronous-saves)).

    Where the copy does not fit what is free, saving waits for the end of the write, and says so once.
    """

    checkpoint: CheckpointConfig = Field(default_factory=lambda: CheckpointConfig(), description="an object")
    """How checkpoints are loaded."""

    hang_timeout: Annotated[float, AfterValidator(_limit_of_seconds)] = Field(
        default=300.0,
        ge=0,
        le=MOST_HANG_TIMEOUT_S,
        allow_inf_nan=False,
        strict=True,
        description=f"a number of seconds from {LEAST_HANG_TIMEOUT_S} to {MOST_HANG_TIMEOUT_S:,}, or 0 for never",
    )
    """Seconds after which a run is ended that stands still while nothing comes forward on any rank of its machine: no
    transfer, no request of the disk, no update, no work of the GPU. The message says who waits for what
    ([liveness](liveness.md)). Slow work is no standstill. 0 switches this off.
    """

    compression: CompressionConfig | None = Field(default=None, description="an object or null")
    """How gradients of blocks' matrices leave the GPU where the link is too slow for all of them; null: exactly."""

    trace: TraceConfig = Field(default_factory=lambda: TraceConfig(), description="an object")
    """A record of what every lane did in chosen steps, for a picture of them."""

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
            raise SlideConfigError(f'{CONFIG_KEY} is {shown(block)}; expected an object such as {{"enabled": true}}')
        if block.get("enabled") is False:
            return None
        if "require_manifest" in _mapping(ds_config.get("checkpoint")):
            raise SlideConfigError(
                "checkpoint.require_manifest is a setting of DS-Slide, and DeepSpeed ignores it there; write it as "
                f"{CONFIG_KEY}.checkpoint.require_manifest"
            )
        block = under_new_names(block)
        refuse_moved(block)
        _refuse_unknown_keys(block, CONFIG_KEY, cls)
        try:
            config = cls.model_validate(dict(block))
        except ValidationError as error:
            # The first complaint only: the others mostly follow from it, and a message is one sentence.
            raise SlideConfigError(_sentence(error.errors(include_url=False)[0], block)) from None
        return config if config.enabled else None


def _nested(key: str, model: type[BaseModel]) -> type[BaseModel] | None:
    """The model of an object that is the value of `key`; None where that is something else."""
    annotation = model.model_fields[key].annotation
    candidates = (annotation, *get_args(annotation))  # an object, or an object or null
    return next((each for each in candidates if isinstance(each, type) and issubclass(each, BaseModel)), None)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _sentence(error: ErrorDetails, block: Mapping[str, Any]) -> str:
    if error["type"] == "value_error" and isinstance(cause := error["ctx"]["error"], SlideConfigError):
        return str(cause)
    # error["loc"] is key after key, then names of union branches and list positions, which say nothing to the user.
    model: type[BaseModel] = SlideConfig
    path, expected = CONFIG_KEY, "an object"
    value: Any = block
    for key in map(str, error["loc"]):
        field, path, value = model.model_fields[key], f"{path}.{key}", value.get(key)  # a key may be missing
        expected = field.description or ""
        nested = _nested(key, model)
        if nested is None or not isinstance(value, Mapping):
            break
        model = nested
    return f"{path} is {shown(value)}; expected {expected}"


def _refuse_unknown_keys(block: Mapping[Any, Any], path: str, model: type[BaseModel]) -> None:
    """Raise SlideConfigError for an unknown key, before pydantic looks, which cannot name a key that is no text."""
    for key, value in block.items():
        if key not in model.model_fields:
            raise SlideConfigError(_unknown_key(path, key, model))
        nested = _nested(key, model)
        if nested is not None and isinstance(value, Mapping):
            _refuse_unknown_keys(value, f"{path}.{key}", nested)


def _unknown_key(path: str, key: Any, model: type[BaseModel]) -> str:
    said = f"{path}.{shown_key(key)} is not a setting of DS-Slide"
    # Of a long text the search for a near one would take minutes.
    near = difflib.get_close_matches(str(key)[:40], model.model_fields, n=1, cutoff=0.5)
    if near:
        return f"{said}; did you mean {path}.{near[0]}?"
    return f"{said}; the settings of {path} are {', '.join(model.model_fields)}"
