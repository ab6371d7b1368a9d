"""Trace SimpleTuner's own trainer on its examples, and keep peaks and verdicts in simpletuner.json.

`python -m published.traced.simpletuner CSV [EXAMPLES [PRECISIONS]]` traces the cells that match two regular expressions
and have no peaks yet.

SimpleTuner of 12 August 2026 (commit c86ea66ff, which brought the table to its state) must be on the path, beside the
packages of the stack "simpletuner 2026-08". Its trainer parses each example's config.json, quantises the denoiser,
adds the adapters, makes the optimizer and computes the loss; the rest of its step (clipping, the optimizer) is called
in its order. Given here are the shapes of the cached latents and embeddings, and denoisers without data: they are
quantised where they lie and appear on the card afterwards, as quantising on the host has it.

A model is built once for each precision, with the optimizer's states, and steps once in each way of checkpointing.
Where an adapter has tensors of the large pool (LoKr's), gradients and states are made by a first step in that way, as
in training: each lies where activations lay, in a block with up to 1 MiB more than it, which counts as allocated.
Where blocks repeat, two shallow models are traced: the peaks of the passes and of the update each grow by equal bytes
with each period of blocks. One tape is played on both cards; the L40S differs by the workspace of cuBLAS.

The table was measured by 2 August (9cef1010d). NOT BLIND: with PyTorch 2.11, the least that SimpleTuner asks for and
what torchao 0.17 is built for, whose autocast leaves torch.rms_norm in 16 bits. From 2.12 on it is cast to fp32, with
which Boogu Image is traced up to 23 % over its table, and LTXVideo 5.8 %.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock, patch

import torch

from memfit.allocator import UNLIMITED
from memfit.allocator.blocks import K_SMALL_SIZE
from memfit.allocator.replay import replay
from memfit.catalogue.cards import find_gpu
from memfit.nouns.gpu import Gpu
from memfit.nouns.tape import Alloc, Event
from memfit.tables.cuda_kernels import cublas_workspace
from memfit.virtual.virtual_gpu import virtual_gpu
from published.simpletuner import CARDS, Cell, cells, keep, known
from published.traced.simpletuner_cases import CASES, Case

# Packages that are imported for logging, storage, audio and pictures; torchvision's wheel needs PyTorch with CUDA.
ABSENT = ("wandb", "torchvision", "fastapi", "imageio", "trainingsample", "boto3", "botocore", "atomicwrites",
          "skrample", "scipy", "torchaudio", "librosa", "pandas")  # fmt: skip
PRECISIONS: dict[str, dict[str, Any]] = {
    "bf16": {"base_model_precision": "no_change"},
    "int8-sdnq-hadamard": {
        "base_model_precision": "int8-sdnq", "sdnq_use_hadamard": True, "sdnq_hadamard_group_size": 256,
        "sdnq_group_size": -1, "sdnq_use_quantized_matmul": True,
    },
    "fp8-torchao": {"base_model_precision": "fp8-torchao"},
    "fp8wo-torchao": {"base_model_precision": "fp8wo-torchao"},
}  # fmt: skip
_LAYER = {
    "gradient_checkpointing": True, "gradient_checkpointing_interval": None,
    "gradient_checkpointing_segment_stride": None, "gradient_checkpointing_offload_attention": False,
}  # fmt: skip
_SEGMENTS = {"gradient_checkpointing_interval": 2, "gradient_checkpointing_segment_stride": 4}
MODES: dict[str, dict[str, Any]] = {
    "none": _LAYER | {"gradient_checkpointing": False},
    "layer": _LAYER,
    "interval2": _LAYER | {"gradient_checkpointing_interval": 2},
    "seg2-stride4": _LAYER | _SEGMENTS,
    "seg2-stride4-offload": _LAYER | _SEGMENTS | {"gradient_checkpointing_offload_attention": True},
    "activation-offload": _LAYER | {"gradient_checkpointing_offload_attention": True},
}
_WORKSPACE = "cuBLAS workspace"
_TORCH = (2, 13)
PARTS = ("passes", "update")  # of a step; the most of each grows by equal bytes with the blocks, the larger may change
Peak = tuple[int, int]  # most allocated and most reserved bytes


def main(path: Path, examples: str = "", precisions: str = "") -> None:
    """Trace the cells whose example and precision match, an example and precision at a time."""
    made = known()  # delete a cell there to trace it again
    wanted = [
        c
        for c in cells(path)
        if re.search(examples, c.example) and re.search(precisions, c.precision) and c.key not in made
    ]
    cards = {name: find_gpu(card) for name, card in CARDS.items()}
    torch.set_num_threads(1)  # a fork has none of OpenMP's threads
    with virtual_gpu(cards["H100"], capacity=None) as card, _standing_in():
        for example, case in CASES.items():
            for precision in PRECISIONS:
                some = [c for c in wanted if (c.example, c.precision) == (example, precision)]
                if some:
                    _trace(card, case, some, cards)


def _trace(card: Any, case: Case, asked: list[Cell], cards: Mapping[str, Gpu]) -> None:
    some = [replace(cell, mode="none") if case.plain else cell for cell in asked]
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "peaks"
        # SDNQ's layers keep more where the trainer says that nothing is checkpointed
        for kept in (True, False):
            part = [c for c in some if "sdnq" not in c.precision or (c.mode != "none") is kept]
            if part and (kept or "sdnq" in part[0].precision):
                for depth in case.depths or (case.whole,):
                    _forked(lambda: _build(card, case, part, depth, kept, cards, found))  # noqa: B023
        peaks: dict[tuple[str, str], dict[str, dict[int, Peak]]] = {}
        for line in found.read_text("utf-8").splitlines() if found.exists() else []:
            mode, name, part, depth, *peak = json.loads(line)
            peaks.setdefault((mode, name), {}).setdefault(part, {})[depth] = (peak[0], peak[1])
    for cell, run in zip(asked, some, strict=True):
        parts = peaks.get((run.mode, run.card), {}).values()
        if len(parts) < len(PARTS) or any(len(at) < max(len(case.depths), 1) for at in parts):
            print(f"{cell.key}: not traced", flush=True)
            continue
        allocated = max(_deep({n: most for n, (most, _) in at.items()}, case.whole) for at in parts)
        reserved = max(_deep({n: held for n, (_, held) in at.items()}, case.whole) for at in parts)
        reserved = max(reserved, allocated)  # what shallow models leave unused does not lie on a line
        verdict = "fits" if reserved <= cards[cell.card].usable_bytes() else "misfit"
        keep(cell, allocated, reserved, verdict)
        print(f"{cell.key}: {allocated / 2**30:.2f} GiB, {verdict}; {cell.measured or 'OOM'}", flush=True)


def _deep(at: dict[int, int], whole: int) -> int:
    """Return the bytes at the whole depth, on the line through those of the deeper two."""
    if len(at) == 1:
        return next(iter(at.values()))
    (shallow, small), (deep, large) = sorted(at.items())[-2:]
    return small + (large - small) * (whole - shallow) // (deep - shallow)


def _build(
    card: Any, case: Case, some: list[Cell], depth: int, kept: bool, cards: Mapping[str, Gpu], found: Path
) -> None:
    trainer = _trainer(some[0], case, MODES["layer" if kept else "none"])
    for name, value in case.standing().items():
        setattr(trainer.model, name, value)
    _load(trainer, case.denoiser() | ({case.key: depth} if case.key else {}))
    groups: dict[Any, list[str]] = {}
    for mode, cell in {cell.mode: cell for cell in some}.items():
        way = (
            "layer" if not case.told_apart(cell.precision) and mode in ("layer", "interval2", "seg2-stride4") else mode
        )
        groups.setdefault(_set(trainer, way), []).append(mode)
    ledger = card.ledger
    large = any(weight.nbytes > K_SMALL_SIZE for weight in trainer._get_trainable_parameters())
    for same in groups.values():
        way = "layer" if "layer" in same else same[0]
        if large:
            _forget(trainer)
            _step(trainer, case, way, lambda: ledger.mark("step", ""))
        else:
            torch.cuda.empty_cache()
        marks = iter([json.dumps([part, *same]) for part in PARTS])
        _step(trainer, case, way, lambda: ledger.mark("step", next(marks)))  # noqa: B023
        gc.collect()
    events: Sequence[Event] = tuple(ledger.events(lambda number: ("temporaries", ledger.labels[number])))
    for name, gpu in cards.items():
        size = cublas_workspace(gpu.compute_capability, "", _TORCH)
        played = [replace(e, size=size) if isinstance(e, Alloc) and e.label == _WORKSPACE else e for e in events]
        with found.open("a", encoding="utf-8") as file:
            for span in replay(played, capacity=UNLIMITED).spans:
                part, *same = json.loads(span.instant) if span.instant.startswith("[") else ("",)
                for mode in same:
                    file.write(json.dumps([mode, name, part, depth, span.peak.allocated, span.peak.reserved]) + "\n")


def _step(trainer: Any, case: Case, mode: str, mark: Callable[[], None]) -> None:
    """One step of Trainer.train, in one of the ways of checkpointing; mark is called at the start of each part."""
    _set(trainer, mode)
    whole = trainer.model.unwrap_model(trainer.model.model)
    # its load_model sets the ways of checkpointing, and loads nothing here
    with (
        patch.object(trainer.model.MODEL_CLASS, "from_pretrained", lambda *_, **__: whole),
        patch.object(trainer.model, "post_model_load_setup", lambda: None),
    ):
        trainer.model.load_model(move_to_device=False)
    (trainer.init_post_load_freeze if trainer.config.gradient_checkpointing else whole.disable_gradient_checkpointing)()
    config = trainer.config
    mark()
    prepared = trainer.prepare_batch(case.batch())
    with trainer.accelerator.accumulate(trainer.model.get_trained_component(unwrap_model=False)):
        loss, *_ = trainer._compute_model_prediction_loss(prepared)
        mean = trainer.accelerator.gather(loss.repeat(config.train_batch_size)).mean()
        trainer.train_loss += mean.item() / config.gradient_accumulation_steps
        trainer.accelerator.backward(loss)
        _clip(trainer)
    mark()
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=config.set_grads_to_none)


def _clip(trainer: Any) -> None:
    config, trained = trainer.config, trainer._get_trainable_parameters
    if config.grad_clip_method == "value":
        trainer._max_grad_value()
    if config.max_grad_norm > 0:
        clip = getattr(trainer.accelerator, f"clip_grad_{config.grad_clip_method}_")
        clip(trained(), config.max_grad_norm)


def _set(trainer: Any, mode: str) -> tuple[Any, ...]:
    """Set a way of checkpointing; return what its own checks and the model leave of it."""
    check = importlib.import_module("simpletuner.helpers.training.default_settings.safety_check")
    config = trainer.config
    for name, value in MODES[mode].items():
        setattr(config, name, value)
    check.safety_check(args=config, accelerator=trainer.accelerator)
    whole = trainer.model.unwrap_model(trainer.model.model)
    return tuple(
        value if name == "gradient_checkpointing" or hasattr(whole, f"set_{name}") else None
        for name, value in ((name, getattr(config, name)) for name in _LAYER)
    )


# --- the trainer, up to its first step ---


def _trainer(cell: Cell, case: Case, mode: Mapping[str, Any]) -> Any:
    found = find_spec("simpletuner")
    assert found is not None and found.submodule_search_locations
    examples = Path(next(iter(found.submodule_search_locations))) / "examples"
    folder = examples / (case.folder or cell.example)
    settings = json.loads((folder / "config.json").read_text("utf-8")) | PRECISIONS[cell.precision] | dict(mode)
    settings |= {"validation_disable": True, "output_dir": tempfile.gettempdir(), "__skip_config_fallback__": True}
    settings["data_backend_config"] = str(examples / Path(settings["data_backend_config"]).name)
    settings.pop("user_prompt_library", None)
    if "lycoris_config" in settings:
        settings["lycoris_config"] = str(folder / "lycoris_config.json")
    trainer = importlib.import_module("simpletuner.helpers.training.trainer").Trainer
    return trainer(settings | case.settings)


def _load(trainer: Any, config: dict[str, Any]) -> None:
    """Call what `Trainer.run` calls between parsing and training, without data; the optimizer's states are made."""
    attention = importlib.import_module("simpletuner.helpers.training.attention_backend")
    model = trainer.model
    kept = {name: value for name, value in config.items() if not name.startswith("_")}

    def built(*_: Any, **words: Any) -> Any:
        dtype = words.get("torch_dtype", torch.bfloat16)
        with torch.device("meta"):
            made = model.MODEL_CLASS.from_config(kept)
        saved = made.state_dict().keys()  # tables that are not saved keep their types
        tables = {name: table for name, table in made.named_buffers() if name not in saved}
        made = made.to(dtype).eval()
        for name, table in tables.items():
            owner, _, attribute = name.rpartition(".")
            made.get_submodule(owner)._buffers[attribute] = table
        return made

    with (
        patch.object(model.MODEL_CLASS, "from_pretrained", built),
        patch.object(type(model), "_module_has_meta_tensors", staticmethod(lambda _: False)),
    ):
        trainer.init_load_base_model()
    trainer.config.quantize_via = "where the weights lie"
    with patch.object(torch.nn.Module, "to", _without_data(torch.nn.Module.to)):
        trainer.init_precision()
        trainer.init_freeze_models()
        trainer.init_trainable_peft_adapter()
    for part in filter(None, (model.model, trainer.lycoris_wrapped_network)):
        _onto_card(part)
    trainer.move_models(destination="accelerator")
    trainer.init_distillation()
    attention.AttentionBackendController.apply(trainer.config, attention.AttentionPhase.TRAIN)
    trainer.init_optimizer()
    whole = model.get_trained_component(unwrap_model=False)
    prepared, trainer.optimizer = trainer.accelerator.prepare(whole, trainer.optimizer)
    model.set_prepared_model(prepared)
    trainer.mark_optimizer_train()
    prepared.train()
    for weight in trainer._get_trainable_parameters():
        weight.grad = torch.empty_like(weight)
    _clip(trainer)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad(set_to_none=trainer.config.set_grads_to_none)


def _forget(trainer: Any) -> None:
    """Drop gradients and the optimizer's states, so that the next step is the first one."""
    for weight in trainer._get_trainable_parameters():
        weight.grad = None
    trainer.optimizer.optimizer.state.clear()
    gc.collect()
    torch.cuda.empty_cache()


def _without_data(real: Callable[..., Any]) -> Callable[..., Any]:
    """Return Module.to that casts weights without data, and does not move them."""

    def to(module: torch.nn.Module, *args: Any, **words: Any) -> Any:
        dtype = torch._C._nn._parse_to(*args, **words)[1]
        if not any(weight.is_meta for weight in module.parameters()):
            return real(module, *args, **words)
        return module if dtype is None else real(module, dtype)

    return to


def _onto_card(model: torch.nn.Module) -> None:
    def moved(t: Any) -> Any:
        if not hasattr(t, "__tensor_flatten__"):
            return t if t.is_cuda else torch.empty_like(t, device="cuda")
        names, context = t.__tensor_flatten__()
        inner = {name: moved(getattr(t, name)) for name in names}
        return type(t).__tensor_unflatten__(inner, context, t.shape, t.stride())

    for module in model.modules():
        for name, table in vars(module).items():  # which their modules copy to the card each time
            if isinstance(table, torch.Tensor) and table.is_meta:
                setattr(module, name, torch.zeros_like(table, device="cpu"))
        for name, weight in list(module._parameters.items()):
            if weight is not None and not weight.is_cuda:
                module._parameters[name] = torch.nn.Parameter(moved(weight.detach()), weight.requires_grad)
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = moved(buffer)


# --- what stands in for the rest ---


@contextmanager
def _standing_in() -> Iterator[None]:
    """Import SimpleTuner without packages that no step needs; no driver, no Hub."""
    from diffusers.schedulers.scheduling_utils import SchedulerMixin
    from transformers.utils import import_utils

    for name in ABSENT:  # what transformers believes is settled before they can be found
        getattr(import_utils, f"is_{name}_available", bool)()
    absent = _Absent()
    sys.meta_path.append(absent)
    os.environ["SIMPLETUNER_LOG_LEVEL"] = "ERROR"
    warnings.simplefilter("ignore")
    total = f"{torch.cuda.get_device_properties(0).total_memory >> 20}".encode()

    def scheduler(cls: Any, *_: Any, **words: Any) -> Any:
        known = signature(cls.__init__).parameters
        return cls(**{name: value for name, value in words.items() if name in known})

    old = torch.library.Library("aten", "IMPL")  # autocast casts torch.rms_norm to fp32 since PyTorch 2.12
    old.impl("rms_norm", torch.library.fallthrough_kernel, "AutocastCUDA", allow_override=True)
    try:
        importlib.import_module("simpletuner.helpers.models.all")
        cosmos: Any = importlib.import_module("simpletuner.helpers.models.cosmos.transformer")
        cosmos.transforms = MagicMock()  # resizes a mask that has the size already
        cosmos.transforms.functional.resize = lambda x, *_, **__: x
        boogu: Any = importlib.import_module("simpletuner.helpers.models.boogu_image.transformer")
        embed = boogu.BooguImageTransformer2DModel.img_patch_embed_and_refine

        def embedded(self: Any, image: Any, others: Any, *rest: Any) -> Any:
            return embed(self, image, others.requires_grad_(), *rest)

        with (
            patch("subprocess.check_output", lambda *_, **__: total),  # nvidia-smi
            # measured with 020314e67, which copied the embeddings of reference pictures, of which there are none
            patch.object(boogu.BooguImageTransformer2DModel, "img_patch_embed_and_refine", embedded),
            patch.object(SchedulerMixin, "from_pretrained", classmethod(scheduler)),
            patch.object(torch, "set_num_threads", lambda _: None),
        ):
            yield
    finally:
        sys.meta_path.remove(absent)


class _Absent:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in ABSENT else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        class Standing(ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                return MagicMock(name=name)

        return Standing(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: there is no code."""


def _forked(work: Callable[[], None]) -> None:
    """Run in a child process, which starts from this one's card."""
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        return
    try:
        work()
    except BaseException:
        print("".join(traceback.format_exc().splitlines(keepends=True)[-4:]), file=sys.stderr)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
