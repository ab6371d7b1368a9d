"""Models on the virtual card, from a config or a checkpoint without data, with adapters, optimizer and batch."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import Tensor
from torch.overrides import TorchFunctionMode

from memfit.errors import TRACE_HINT, BadInput
from memfit.nouns.gpu import Gpu
from memfit.tables.adapters import adapter
from memfit.tables.optimizers import optimizer
from memfit.tables.tasks import TASKS
from memfit.units import GIB
from memfit.virtual.device.dispatch import current
from memfit.virtual.device.ledger import WARM_UP
from memfit.virtual.patching import patched
from memfit.virtual.process import sparse_tensors
from memfit.virtual.process.host import HUGE, room

try:
    from transformers.initialization import no_init_weights as no_init_weights
except ImportError:  # transformers 4, which a traced script may use
    from transformers.modeling_utils import no_init_weights as no_init_weights  # type: ignore[attr-defined, no-redef]

if TYPE_CHECKING:
    from memfit.virtual.jobs.recipe import Setup

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LEFT = int(1.2 * GIB) + 1  # bytes that caching_allocator_warmup (transformers 5.23) leaves free, rounded as there
# encoders that are trained to fill in masked tokens
_MASKED = ("bert", "roberta", "modernbert", "deberta-v2", "distilbert", "electra", "albert", "xlm-roberta")
_BUILT = {"device": "cuda", "meta": "meta"}
_IGNORED = ("torch_dtype", "dtype", "transformers_version", "architectures", "auto_map", "quantization_config")


def config_of(setup: Setup) -> Any:
    """Return a new transformers config; a model may change its own. Raises BadInput for what transformers refuses."""
    given = {k: v for k, v in setup.config.items() if k not in _IGNORED}
    kind = given.pop("model_type")
    own = ", and no code of a model's own repository is run here" if "auto_map" in setup.config else ""
    if kind not in transformers.CONFIG_MAPPING:
        raise BadInput(f"transformers {transformers.__version__} knows no model {kind!r}{own}", hint=TRACE_HINT)
    try:
        config = transformers.AutoConfig.for_model(kind, **given)
    except Exception as error:  # each model checks its values in its own way
        said = str(error).strip().split("\n")[0]
        text = f"transformers {transformers.__version__} refuses this config.json of {kind!r}: {said}"
        raise BadInput(text, hint=f"mend the file, or {TRACE_HINT}") from None
    if setup.use_cache is not None:
        config.use_cache = setup.use_cache
    if setup.task:
        from memfit.virtual.jobs.tasks import configured

        return configured(setup, config)
    return config


def class_of(config: Any, task: str = "") -> Any:
    """Return the AutoModel class that builds the model for training."""
    if task:
        return getattr(transformers, TASKS[task].auto)
    if config.model_type in _MASKED:
        return transformers.AutoModelForMaskedLM
    seq2seq = config.is_encoder_decoder
    return transformers.AutoModelForSeq2SeqLM if seq2seq else transformers.AutoModelForCausalLM


def load(setup: Setup) -> Any:
    """Load the model onto the device where the job first has it (`Setup.load`)."""
    config, dtype = config_of(setup), DTYPES[setup.dtype]
    arguments: dict[str, Any] = {"dtype": dtype}
    if setup.attention != "sdpa":  # sdpa is the default, which transformers replaces by eager where a model lacks it
        arguments["attn_implementation"] = setup.attention
    if setup.load in ("checkpoint", "zero3"):
        arguments |= quantization_of(setup)
        if setup.load == "checkpoint" and not zero_3(setup):  # which refuses a device map
            arguments["device_map"] = {"": "cpu" if setup.shard != "none" and setup.loading == "host" else 0}
        with tempfile.TemporaryDirectory() as folder, hollow_files():
            made_by = class_of(config, setup.task)
            checkpoint(config, dtype, Path(folder), made_by.from_config)
            return made_by.from_pretrained(folder, local_files_only=True, **arguments)
    where = _BUILT.get(setup.load, "cpu")
    with torch.device(where), no_init_weights(), _UnbackedHost() if where == "cpu" else nullcontext():
        model = class_of(config, setup.task).from_config(config, **arguments)
    model.tie_weights()
    return model


def quantization_of(setup: Setup) -> dict[str, Any]:
    """Return the arguments of from_pretrained that quantise the job's model."""
    if not setup.quantization:
        return {}
    given = {"bnb_4bit_compute_dtype": DTYPES[setup.dtype], **setup.quantization}
    return {"quantization_config": transformers.BitsAndBytesConfig(**given)}


def zero_3(setup: Setup) -> bool:
    """Return whether DeepSpeed shards the weights."""
    return bool(setup.deepspeed.get("zero_optimization", {}).get("stage") == 3)


class _UnbackedHost(TorchFunctionMode):
    """Build huge weights on the host without reserving memory (DeepSeek-V3's experts: 28 GiB a layer in fp32)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros) and kwargs.get("device") is None:
            made = func(*args, **{**kwargs, "device": "meta"})
            if made.numel() * made.element_size() >= HUGE:
                return room(made.shape, made.dtype)
        return func(*args, **kwargs)


def checkpoint(config: Any, dtype: torch.dtype, folder: Path, build: Any = None) -> None:
    """Write a safetensors file with the right names, shapes and dtype; its data is a hole in a sparse file.

    build: makes the model from a config (default: the class that the job trains).
    """
    unsharded = patched(transformers.modeling_utils, {"is_deepspeed_zero3_enabled": lambda: False})
    with torch.device("meta"), no_init_weights(), unsharded:
        model = (build or class_of(config).from_config)(config, dtype=dtype)
    model.tie_weights()  # a published checkpoint holds a tied matrix once
    named = ((name, p.dtype, p.shape) for name, p in model.named_parameters())
    sparse_tensors.write(folder / "model.safetensors", named)
    config.save_pretrained(folder)


class _Slice:
    """One tensor of a file, whose data is not read."""

    def __init__(self, about: dict[str, Any]) -> None:
        self._shape, self._dtype = about["shape"], about["dtype"]

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        """Return the dtype by safetensors' name."""
        return str(self._dtype)

    def __getitem__(self, index: Any) -> Tensor:
        """Return the part of the tensor that a rank reads of it."""
        shape = torch.empty(self._shape, device="meta")[index].shape
        return room(shape, sparse_tensors.DTYPES[str(self._dtype)])


class HollowFile:
    """safetensors.safe_open that reads only the header; tensors are uninitialised."""

    def __init__(self, path: Any, *_: Any, **__: Any) -> None:
        self._about = _header(str(path), Path(path).stat().st_mtime_ns)

    def __enter__(self) -> HollowFile:
        return self

    def __exit__(self, *_: Any) -> None:
        """Do nothing: no file is open."""

    def keys(self) -> list[str]:
        return [name for name in self._about if name != "__metadata__"]

    def metadata(self) -> dict[str, str]:
        return dict(self._about.get("__metadata__", {}))

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._about[name])

    def get_tensor(self, name: str) -> Tensor:
        """Return an uninitialised tensor of the right shape and dtype."""
        return _Slice(self._about[name])[...]


@cache
def _header(path: str, _: int) -> dict[str, Any]:
    """Return a file's header, read once; the second argument is when the file was changed."""
    return sparse_tensors.header(Path(path))


@contextmanager
def hollow_files() -> Iterator[None]:
    """Make transformers read the names and shapes of checkpoints, but not their data."""
    import transformers.modeling_utils as loading

    with patched(loading, {"safe_open": HollowFile}), _warm_up_labelled(loading):
        yield


def largest_warm_up(gpu: Gpu) -> int:
    """Return the most that `caching_allocator_warmup` allocates on a card, as float16 elements."""
    return (gpu.total_bytes - LEFT) // 2 * 2


@contextmanager
def _warm_up_labelled(loading: Any) -> Iterator[None]:
    """Label what transformers allocates once before it loads: as much as it will load, or all but LEFT of the card."""
    warm_up = loading.caching_allocator_warmup

    def labelled(*args: Any, **words: Any) -> None:
        labels = current().ledger.labels
        start = len(labels)
        warm_up(*args, **words)
        labels[start:] = [WARM_UP] * (len(labels) - start)

    with patched(loading, {"caching_allocator_warmup": labelled}):
        yield


# --- adapters, optimizers, batches ---

# keywords of gradient_checkpointing_enable; "selective" is TRL's
CHECKPOINTING: dict[str, dict[str, bool]] = {
    "nonreentrant": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "selective": {"use_reentrant": False, "selective": True},
    "offload": {"use_reentrant": False, "offload": True},
}


def adapter_config(setup: Setup) -> Any:
    """Return PEFT's configuration of the job's adapters. Raises BadInput where the installed PEFT has no such."""
    import peft

    row = adapter(setup.adapter)
    if not hasattr(peft, row.config):
        hint = "pip install -U peft, or --adapter lora, which every PEFT has"
        raise BadInput(f"PEFT {peft.__version__} has no {row.title}", hint=hint)
    task = None if setup.config.get("model_type") in _MASKED else "CAUSAL_LM"  # PEFT has no task for masked tokens
    head = ""
    if setup.task:
        task, head = TASKS[setup.task].peft or None, TASKS[setup.task].head
    layers = config_of(setup).get_text_config().num_hidden_layers if row.layers else 0
    found = row.words(setup.rank, setup.alpha, setup.dropout, setup.targets, layers)
    words = {name: list(value) if isinstance(value, range) else value for name, value in found.items()}
    words["task_type"] = task
    saved = [*setup.modules_to_save, *([head] if head and row.targets != "none" else [])]
    if saved:
        words["modules_to_save"] = saved
    return getattr(peft, row.config)(**words)


def with_adapters(setup: Setup, model: Any) -> Any:
    """Return the model with PEFT's adapters, prepared for k-bit training where it is quantised."""
    from peft import get_peft_model, prepare_model_for_kbit_training

    if setup.method == "qlora" and setup.prepare_kbit:
        on = setup.checkpointing != "none"
        words = {"gradient_checkpointing_kwargs": {"use_reentrant": setup.checkpointing == "reentrant"}} if on else {}
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=on, **words)
    made = get_peft_model(model, adapter_config(setup))
    if setup.widen:
        widen(made)
    return made


def widen(model: Any) -> None:
    """Cast everything that is trained to fp32, as LLaMA-Factory does."""
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()


def merge(setup: Setup, model: Any) -> None:
    """Merge adapters into the weights; PEFT has no such for prompts, nor for some methods on a quantised base."""
    unmerged = () if adapter(setup.adapter).by_formula else (NotImplementedError, ValueError)
    if hasattr(model, "merge_and_unload"):  # nor has sentence-transformers
        with suppress(*unmerged):
            model.merge_and_unload()


def make_optimizer(name: str, parameters: list[Tensor]) -> Any:
    """Make the optimizer of a hand-written loop, by its key or by transformers' name."""
    row = optimizer(name)
    module, _, kind = row.loop.rpartition(".")
    taken = [p for p in parameters if p.dim() == 2] if row.matrices_only else parameters
    return getattr(import_module(module), kind)(taken, lr=1e-5, **row.arguments)


def batch_of_one(setup: Setup) -> dict[str, Tensor]:
    """Return one sample as a batch, of which a larger one is a concatenation. [1, ...]"""
    if setup.task:
        from memfit.virtual.jobs.tasks import batch_of_one

        return batch_of_one(setup, config_of(setup))
    return {name: value[None] for name, value in sample(setup).items()}


def sample(setup: Setup) -> dict[str, Tensor]:
    """Return one sample; of a language model zeros: token ids, labels and the mask of the setup. Each [S], int64."""
    if setup.task:
        from memfit.virtual.jobs.tasks import sample_of

        return sample_of(setup, config_of(setup))
    ids = torch.zeros(setup.sequence, dtype=torch.long)
    labels = ids.clone()
    labels[int(setup.sequence * setup.labelled) :] = -100
    made = {"input_ids": ids, "labels": labels}
    if setup.mask != "none":
        made["attention_mask"] = torch.ones_like(ids)
        if setup.mask == "padded":
            made["attention_mask"][-min(8, setup.sequence // 2) :] = 0
    return made
