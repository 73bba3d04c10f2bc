"""SlideConfig: every setting of the "ds_slide" block, with its range and its default.

A wrong value is reported by its JSON path and what was expected there; an unknown key by the nearest valid one.
"""

import difflib
import os
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
from ds_slide.config.values import SIZE_HELP, check_directory_text, expanded_directory, parse_bytes, shown, shown_key
from ds_slide.errors import SlideConfigError
from ds_slide.report.trace import TraceRequest

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
MOST_THREADS = 4096
LEAST_HANG_TIMEOUT_S, MOST_HANG_TIMEOUT_S = 0.1, 100_000_000
# A disk that would get less than one stripe in 32 is left out (ds_slide.store.ssd.extents), so more are of no use.
MOST_DIRECTORIES = 32
MOST_TRACED_STEPS = 100  # some thousand events each, which wait in memory until the last of them has ended
# Below 16 the padding of a d x d state to whole cache lines, and a launch for it, cost more than the transfer.
LEAST_D, MOST_D, MOST_R = 16, 65_536, 16
MOST_STEPS, MOST_BIAS = 1_000_000_000, 100

Budget = Annotated[Annotated[int, Field(gt=0)] | None, BeforeValidator(_size_or_none)]
StateBudget = Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_size_or_none)]
AutoSize = Annotated[int | Literal["auto"], BeforeValidator(_size_or_auto)]
BufferCount = Annotated[StrictInt, Field(ge=2, le=4096)]
BUFFERS_HELP = "an integer from 2 to 4096"
CoreNumber = Annotated[StrictInt, Field(ge=0, le=1023)]  # a cpu_set_t has 1,024 bits
Path = Annotated[StrictStr, Field(min_length=1)]
Paths = Annotated[
    Annotated[tuple[Path, ...], Field(min_length=1, max_length=MOST_DIRECTORIES)] | None, BeforeValidator(_directories)
]
ModulePath = Annotated[StrictStr, Field(min_length=1)]
KernelKind = Literal["loss", "norm", "rope", "mlp", "lora"]


class _Block(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False)


class DebugConfig(_Block):
    """Switches for tests of DS-Slide itself; they cost speed and never change a result."""

    lane_delay_ms: float = Field(
        default=0.0,
        ge=0,
        le=60_000,
        allow_inf_nan=False,
        strict=True,
        description="a number of milliseconds from 0 to 60000",
    )
    """Longest random delay before every operation of every lane.

    It brings races out. 0 switches it off.
    """

    seed: StrictInt = Field(default=0, ge=0, le=2**63 - 1, description="an integer from 0 to 2^63 - 1")
    """Seed of these delays."""

    out_of_place: Literal["auto"] | StrictBool = Field(default="auto", description='"auto", true or false')
    """Whether speculative updates write to spare state buffers.

    These take 12 bytes a parameter (14 for fp16) and become the block's own when the update counts. Without them,
    an update works in place and writes an undo log. "auto": all blocks get undo logs, then half of the host memory
    that is left goes to spare state buffers. true: spare state buffers first. false: undo logs only. Short moments,
    blocks that train in part, and several ranks always have undo logs.
    """

    take_back: float = Field(
        default=0.0, ge=0, le=1, allow_inf_nan=False, strict=True, description="a number from 0 to 1"
    )
    """Share of speculative updates that are undone at random.

    They are undone although they would count.
    """


class CheckpointConfig(_Block):
    """How checkpoints are loaded."""

    require_manifest: StrictBool = Field(default=False, description="true or false")
    """Whether a checkpoint without a manifest is refused.

    Stock DeepSpeed writes none. A manifest shows damage. It does not prove who wrote the files ([what is
    trusted](checkpoints.md#what-is-trusted)).
    """


class TraceConfig(_Block):
    """A record of what every lane did in chosen steps."""

    path: Annotated[StrictStr, Field(min_length=1)] | None = Field(
        default=None, description='a file that is to be written, such as "step.json", or null'
    )
    """File for the record of chosen steps; null records nothing.

    The file is a Chrome trace in JSON. Perfetto opens it, and [`ds-slide trace`](tracing.md) reads it. With several
    ranks each writes its own file: "step.rank1.json". `~` and `$NAME` mean what they mean in a shell.
    """

    steps: Annotated[tuple[StrictInt, StrictInt], AfterValidator(_first_and_last)] = Field(
        default=(3, 3), description=f"the first and the last of at most {MOST_TRACED_STEPS} steps, the first at least 2"
    )
    """First and last step that are recorded.

    They are counted as in `slide_stats()["step"]`. The very first step has no beginning, so 2 is the earliest.
    """

    def request(self) -> TraceRequest | None:
        """Return what to record; None without a path. The file is written much later, so it is checked at the start.
        Raises SlideConfigError where it could not be written."""
        if self.path is None:
            return None
        name = f"{CONFIG_KEY}.trace.path"
        path = expanded_directory(self.path, name)
        if path.is_dir():
            raise SlideConfigError(
                f'{name} is {shown(self.path)}, which is a directory; name a file in it ("step.json")'
            )
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise SlideConfigError(
                f"{name} is {shown(self.path)}, but no file can be written in {shown(str(path.parent))}; "
                "make that directory, or name another one"
            )
        return TraceRequest(path, *self.steps)


class CompressionConfig(_Block):
    """Gradients in learned subspaces ([compression](compression.md)). Lossy."""

    type: Literal["lsp"] = Field(description='"lsp"')
    """The method: LSP-Offload.

    The gradient G of a matrix goes down as P^T G Q, which is d x d. It is updated there and comes back as P D Q^T.
    """

    d: Literal["auto"] | Annotated[StrictInt, Field(ge=LEAST_D, le=MOST_D)] = Field(
        default="auto", description=f'"auto" or an integer from {LEAST_D} to {MOST_D:,}'
    )
    """Rows and columns of the subspace.

    A matrix gets at most half of its smaller side. "auto": the largest d whose transfers and updates still fit
    beside the GPU's work, by the ceilings of this machine.
    """

    r: Annotated[StrictInt, Field(ge=1, le=MOST_R)] = Field(default=4, description=f"an integer from 1 to {MOST_R}")
    """Nonzero numbers in each row of P and Q."""

    master_dtype: Literal["auto", "fp32", "bf16"] = Field(default="auto", description='"auto", "fp32" or "bf16"')
    """Masters of the compressed matrices, on the GPU.

    "fp32": bf16 weights with their low halves, exact, 4 bytes a parameter. "bf16": the bf16 weights alone, each
    update rounded stochastically, 2 bytes. "auto": "fp32" if what the engine itself places fits; activations come
    on top.
    """

    check_every: Annotated[StrictInt, Field(ge=1, le=MOST_STEPS)] = Field(
        default=500, description=f"an integer from 1 to {MOST_STEPS:,}"
    )
    """Steps from one check of the projectors to the next.

    The first step is checked.
    """

    threshold: Annotated[float, Field(ge=0, le=MOST_BIAS, allow_inf_nan=False, strict=True)] | None = Field(
        default=None, description=f"a number from 0 to {MOST_BIAS}, or null"
    )
    """Error of the subspace that makes a check fit P and Q anew.

    The error (`bias` in the statistics) is the part of a gradient, by its norm, that the way through the subspace loses
    or adds. null: P and Q are never fitted. Fits made the loss worse in each training that was compared
    ([page](../benchmarks/results/2026-11-24_nvidia-h100_compression-curves.md)).
    """

    seed: StrictInt = Field(default=0, ge=0, le=2**63 - 1, description="an integer from 0 to 2^63 - 1")
    """Seed of the first P and Q and of stochastic rounding."""


class SlideConfig(_Block):
    """The "ds_slide" block. Sizes are stored in bytes, lists as tuples."""

    enabled: StrictBool = Field(default=False, description="true or false")
    """Whether DS-Slide replaces DeepSpeed's ZeRO-3 optimizer.

    With false, stock DeepSpeed runs.
    """

    window: Literal["auto"] | BufferCount = Field(default="auto", description=f'"auto" or {BUFFERS_HELP}')
    """Number of GPU slots, one block each.

    One slot computes, and at least one is filled meanwhile. "auto" is 3, and more slots if they fit into 10 % of
    the GPU and into `gpu_memory`. A block that is still in its slot is not fetched again, neither in backward nor
    in the other micro-batches of a step. After the first steps "auto" has more slots, or fewer, where that makes a
    step shorter. Give 3 if activations need all of the GPU.
    """

    gpu_memory: Budget = Field(default=None, description=f"{SIZE_HELP}, above 0, or null for what is free")
    """Limit of what DS-Slide itself places on the GPU.

    It includes the activations that DS-Slide keeps. null: what is free. The whole process is limited by
    `torch.cuda.set_per_process_memory_fraction`, within which DS-Slide plans.
    """

    host_memory: StateBudget = Field(default=None, description=f"{SIZE_HELP}, 0, or null for what is free")
    """Limit of the states in host memory.

    null: what the machine, the container's control groups and `ulimit -v` leave free. With an SSD tier, the rest
    goes there, block by block; 0 puts every state there that may go. Held gradients and staging buffers come on top
    of the limit. Undo logs and inputs of blocks take what the states leave of it. With an SSD tier, further inputs
    go there, too.
    """

    nvme_path: Paths = Field(
        default=None,
        description=f"a directory, a list of at most {MOST_DIRECTORIES} directories on different disks, or null",
    )
    """Directories of the SSD tier.

    Several are striped, in proportion to their measured bandwidths. `~` and `$NAME` mean what they mean in a shell.
    null: DeepSpeed's own `zero_optimization.offload_optimizer.nvme_path` or `offload_param.nvme_path`.
    """

    state_dtype: Literal["fp32", "bf16", "8bit"] = Field(default="fp32", description='"fp32", "bf16" or "8bit"')
    """Storage of the two moments of AdamW, and of Muon's momentum.

    "fp32" is exact. "bf16" rounds stochastically. "8bit" has a scale for each 64 numbers, and is for AdamW alone.
    Other optimizers have "fp32" only. The masters of the weights stay exact. The two short formats save 4 and nearly
    6 of AdamW's 12 bytes a parameter, in memory and on SSD. They exclude `gpu_states`.
    """

    ssd_buffers: Literal["auto"] | BufferCount = Field(default="auto", description=f'"auto" or {BUFFERS_HELP}')
    """Host buffers for optimizer states between SSD and update.

    A buffer holds 8 Mi parameters (80 MiB in fp32). "auto": enough to keep a fast disk busy, at most 16.
    """

    weight_buffers: Literal["auto"] | BufferCount = Field(default="auto", description=f'"auto" or {BUFFERS_HELP}')
    """Host buffers for weights that live on SSD, one block each.

    "auto": 7, or 4 more than the `window` that is given.
    """

    io_backend: Literal["auto", "io_uring", "libaio", "threads"] = Field(
        default="auto", description='"auto", "io_uring", "libaio" or "threads"'
    )
    """How the SSD is read and written.

    "auto" takes the first that works on this machine.
    """

    checksums: StrictBool = Field(default=True, description="true or false")
    """Whether reads from SSD are compared with what was written.

    A CRC32C of every 4 KiB is kept in host memory: 4 bytes for 4 KiB on SSD. If the disk or another program has
    changed bytes, the run ends with file and offset. Without checksums such bytes become wrong losses.
    """

    gpu_states: AutoSize = Field(default="auto", description=f'"auto", 0 or {SIZE_HELP}')
    """GPU memory for optimizer states.

    Outer modules come first, then the first blocks; they are updated on the GPU. 0 keeps all states in host memory.
    "auto" takes 5 % of the GPU, if the GPU budget leaves that. It takes up to 60 % if host memory has no place for
    the rest and there is no SSD tier. It takes more when the first steps have shown [what is
    spare](budgets.md#spare-gpu-memory).
    """

    activations: Literal["auto", "whole_blocks", "as_written"] = Field(
        default="auto", description='"auto", "whole_blocks" or "as_written"'
    )
    """Which blocks are recomputed in backward.

    "auto": DS-Slide decides for each layer of transformers and each forward, whether or not the script has switched
    gradient checkpointing on. If memory is left, the layer's saved tensors stay on the GPU; otherwise it is
    recomputed, with the same bits. If that does not suffice, inputs of recomputed blocks wait in host memory, and
    then on SSD. Some models [are left alone](budgets.md#spare-gpu-memory). With "auto" a
    block may also keep some results and recompute the rest. With "whole_blocks" it keeps all that it saves, or nothing.
    "as_written": always what the script says.
    """

    captured_blocks: Literal["auto"] | StrictBool = Field(default="auto", description='"auto", true or false')
    """Whether blocks replay recordings (CUDA graphs).

    The host then launches one graph for a block's forward and one for its backward in place of hundreds of operators,
    with the same bits. It concerns batches of frequent shapes, without autocast. Blocks keep their activations, or all
    are recomputed where these find no room or most weights stream ([recorded blocks](budgets.md#recorded-blocks)).
    "auto": where the GPU waits for the host and has the memory. true: also where it does not wait, for blocks with
    experts, and on the CPU accelerator, which runs the operators again. Muon's updates are recorded too, unless it is
    false.
    """

    update_passes: Literal["auto", 1, 2] = Field(default="auto", description='"auto", 1 or 2')
    """Passes of a deferred update over states in host memory.

    1: one pass, under the next forward. 2: the weights under the forward and the states under its backward. "auto":
    2 while the updates take longer than the forward, unless steps are longer with it.
    """

    speculate: Literal["auto"] | StrictBool = Field(default="auto", description='"auto", true or false')
    """Whether updates begin under backward, before the norm is known.

    Such a speculative update assumes that the norm is below the limit. If it is not, the update is undone. It
    concerns blocks in host memory. "auto": while the last four norms were below the limit and the updates take
    longer than the forward. With false, no memory is set aside for the way back.
    """

    share_weights: Literal["auto"] | StrictBool = Field(default="auto", description='"auto", true or false')
    """Whether ranks of a machine read each other's weights in host memory.

    Then each rank uploads whole units. With false, each uploads its part, and the process group gathers the parts:
    more work for the GPU, but fewer bytes through a host link that several GPUs share. Weights on SSD and units
    that are updated on the GPU are always gathered. With ranks on several machines "auto" gathers all weights, and
    true is refused.
    """

    defer_updates: Literal["auto"] | StrictBool = Field(default="auto", description='"auto", true or false')
    """Whether gradients wait in host memory until backward has ended.

    "auto": if gradient clipping, fp16 or gradient accumulation need that. Otherwise a block is updated as soon as
    its gradient has arrived. The old name of this key, `hold_gradients`, still works.
    """

    gradient_buffers: Literal["auto"] | BufferCount = Field(default="auto", description=f'"auto" or {BUFFERS_HELP}')
    """Host staging buffers for gradients, one block each.

    They serve gradients that are not held, or are held on SSD. "auto": 4. If updates begin as gradients arrive,
    "auto" is one for every three blocks, if host memory has room. Backward waits when all buffers hold gradients
    whose updates have not ended.
    """

    cpu_threads: Literal["auto"] | Annotated[StrictInt, Field(ge=1, le=MOST_THREADS)] = Field(
        default="auto", description=f'"auto" or an integer from 1 to {MOST_THREADS}'
    )
    """Threads of the CPU update on this rank.

    "auto": the cores that this process may use, shared between the ranks that were started with the same cores. If each
    memory node (NUMA) has a GPU, a rank's cores are at the node of its GPU.
    """

    cpu_cores: Literal["auto", "none"] | Annotated[tuple[CoreNumber, ...], Field(min_length=1)] = Field(
        default="auto",
        description='"auto", "none" or a list of core numbers from 0 to 1023 such as [0, 1, 2, 3]',
    )
    """Cores that the update threads are pinned to.

    "auto": the rank's share. Shares of fewer than eight cores are not pinned core by core. Then, and for the other
    threads of the engine, a host with several memory nodes (NUMA) keeps them at the nodes of the share. The engine's
    memory comes from these nodes. "none" and a list of cores do without that.
    """

    blocks: Literal["auto"] | Annotated[tuple[ModulePath, ...], Field(min_length=1)] = Field(
        default="auto", description='"auto" or a list of module paths such as ["model.layers"]'
    )
    """Module paths of what is streamed as blocks.

    The path of a list or dictionary of layers stands for its elements; any other path stands for that module. Each
    part of a path may be a pattern: ["encoder.*.layers"], ["layer?"], ["block_*"]. "auto" finds layers of one class
    that repeat and hold a tenth of the model, in lists, in dictionaries and as attributes.
    """

    stream_head: StrictBool = Field(default=False, description="true or false")
    """Whether the weight of the language model head stays in host memory.

    Its rows then pass through the GPU in chunks. For a head of 152,064 x 8,192 the GPU holds buffers of 0.2 GB
    instead of 7.5 GB (weight, gradient, and the fp32 sum of the gradient in the loss). It also holds an fp32 sum of
    the loss's input gradient. The kernel of the loss computes the logits a second time in backward: four products
    instead of three, each with its transfers under it. It needs one rank and a head that shares its weight with
    nothing. If gradients are not held, the head may be used once in a backward.
    """

    experts: AutoSize = Field(default="auto", description=f'"auto", 0 or {SIZE_HELP}')
    """GPU buffer for frozen experts that move in parts.

    Blocks then leave their [experts](adapters.md#experts-that-move-in-parts) in host memory. A few experts at a time
    pass through three buffers of this size while the block computes, and experts without a token are not fetched. A
    size: in parts, at least one expert at a time. It needs fused experts of transformers, which this rank can read in
    host memory. "auto": whole blocks, unless their slots do not fit or take more than half of the GPU budget; then in
    buffers of 256 MiB. Whole blocks still leave out experts without a token in forwards of few tokens without
    gradients. 0: always whole.
    """

    huge_pages: StrictBool = Field(default=False, description="true or false")
    """Whether states in host memory ask for transparent huge pages.

    The buffers of the disk always do.
    """

    kernels: Literal["auto", "off"] | Annotated[tuple[KernelKind, ...], Field(min_length=1)] = Field(
        default="auto", description='"auto", "off" or a list out of "loss", "norm", "rope", "mlp" and "lora"'
    )
    """Which parts of the model are computed by Triton kernels.

    The kinds are the loss from the head's input (logits are then made only if something reads them), norms, rotary
    embeddings, and gated feed-forwards. A module is replaced only if a probe shows that the kernel computes the
    same; results differ by rounding. "auto": all of them on a GPU with Triton, none elsewhere. A list needs a GPU.
    """

    flat_pieces: StrictBool = Field(default=False, description="true or false")
    """Whether a script's optimizer may step on flat pieces of parameters.

    Each rank has a flat piece of every parameter. An optimizer that treats each element by itself has the same result
    there. One that treats matrices by their shape, such as Adafactor, is another optimizer there, under stock ZeRO-3
    too, and is refused unless this is true ([optimizers](optimizers.md#several-ranks)).
    """

    muon_scale: Literal["deepspeed", "moonlight"] = Field(default="deepspeed", description='"deepspeed" or "moonlight"')
    """The factor of Muon's orthogonal update of a matrix.

    "deepspeed": sqrt(max(1, rows / columns)), as in DeepSpeed and in the first Muon. "moonlight": 0.2 *
    sqrt(max(rows, columns)), as in Moonlight and Kimi K2, where Muon takes the learning rate and the weight decay of
    AdamW.
    """

    muon_norm: Literal["gradient", "update"] = Field(default="gradient", description='"gradient" or "update"')
    """What `gradient_clipping` limits the norm of under Muon.

    "gradient": the gradient, as in plain torch. "update": for Muon's matrices the orthogonal update, as in DeepSpeed.
    That norm is about the square root of the number of rows of all matrices, so a limit of 1.0 makes every step
    smaller. All orthogonal updates are then computed in `engine.step()` ([optimizers](optimizers.md#muon)).
    """

    muon_kernel: Literal["auto"] | StrictBool = Field(default="auto", description='"auto", true or false')
    """Whether a Hopper kernel makes Muon's symmetric products.

    "auto": where the GPU has it. true: the log says if the GPU lacks it. With all states on an H200 a step of Qwen2.5
    3B took 0.715 s with it and 0.764 s without, and 0.911 and 0.968 s in 24 GiB. Its sums have another order than those
    of cuBLAS, so losses differ in their last digits ([optimizers](optimizers.md#muon)).
    """

    async_save: StrictBool = Field(default=False, description="true or false")
    """Whether `save_checkpoint` returns before the files are written.

    It returns when the states have been copied in host memory, and a thread writes the copy
    ([checkpoints](checkpoints.md#asynchronous-saves)). If free memory does not hold the copy, saving waits for the
    end of the write, and says so once.
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
    """Seconds of standstill after which a run is ended.

    Standstill means that nothing comes forward on any rank: no transfer, no request of the disk, no
    update, no work of the GPU. Slow work is no standstill. The message says what waits for what
    ([liveness](liveness.md)). 0 switches this off.
    """

    compression: CompressionConfig | None = Field(default=None, description="an object or null")
    """How gradients of the blocks' matrices leave the GPU; null: exactly.

    It is for links that are too slow for all gradients.
    """

    trace: TraceConfig = Field(default_factory=lambda: TraceConfig(), description="an object")
    """A record of what every lane did in chosen steps."""

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
