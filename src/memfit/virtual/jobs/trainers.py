"""The trainers of transformers, TRL and sentence-transformers, unmodified, and the checkpoints they save and resume."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import Trainer, TrainerCallback, modeling_utils, trainer_utils

from memfit.frameworks.process_layout import BLOCKS
from memfit.tables.tasks import TASKS
from memfit.virtual.jobs import sampling
from memfit.virtual.jobs.models import (
    CHECKPOINTING,
    DTYPES,
    adapter_config,
    checkpoint,
    class_of,
    config_of,
    hollow_files,
    load,
    merge,
    quantization_of,
    sample,
    widen,
    with_adapters,
)
from memfit.virtual.jobs.recipe import Setup
from memfit.virtual.jobs.tasks import compared, of_trl, padding_of, words
from memfit.virtual.observer import Observer
from memfit.virtual.patching import patched
from memfit.virtual.process.files import Saves

# --- checkpoints ---


class _Loaded(Exception):
    """Ends a resumed training once the checkpoint is loaded; what follows would repeat the first training."""


class Saving(TrainerCallback):
    """Marks where the last step's checkpoint begins, and ends a training that was just resumed."""

    def __init__(self, observer: Observer) -> None:
        self._observer, self.resuming = observer, False

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Mark the end of the last step, after which the trainer saves."""
        if state.global_step >= args.max_steps:
            self._observer.mark("save", "saving a checkpoint")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a resumed training: everything is loaded."""
        if self.resuming:
            raise _Loaded


@contextmanager
def without_files() -> Iterator[None]:
    """Keep only the shapes of tensors that are saved. The functions are replaced wherever a library imported them."""
    import peft.peft_model
    import peft.utils.save_and_load

    saves = Saves(lambda: None, lambda: None)
    load = saves.load(torch.load)
    load_file = lambda file, device="cpu": load(file, device)  # noqa: E731
    with ExitStack() as stack:
        for module, words in (
            (torch, {"save": saves.save, "load": load}),
            (safetensors.torch, {"save_file": saves.save, "load_file": load_file}),
            (modeling_utils, {"safe_save_file": saves.save}),
            (trainer_utils, {"safe_load_file": load_file}),  # for checkpoints in several files
            (peft.peft_model, {"safe_save_file": saves.save}),
            (peft.utils.save_and_load, {"safe_load_file": load_file}),
        ):
            stack.enter_context(patched(module, words))
        yield


def resume(trainer: Any, saving: Saving, observer: Observer, folder: str) -> None:
    """Load the checkpoint as in a new process: the model is on the card, without optimizer states or cached blocks."""
    trainer.optimizer = trainer.lr_scheduler = None
    trainer.callback_handler.optimizer = trainer.callback_handler.lr_scheduler = None
    for module in trainer.model_wrapped.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # an evaluation leaves the last module gathered
    trainer.accelerator.free_memory()  # empties the cache too
    observer.restarted()
    observer.mark("resume", "loading a checkpoint")
    saving.resuming = True
    with suppress(_Loaded):
        trainer.train(resume_from_checkpoint=str(next(Path(folder).glob("checkpoint-*"))))


# --- trainers ---

EVALUATED = 2  # evaluation batches; the second and all later ones begin with the same memory
_OPTIM = {"adamw_forloop": "adamw_torch", "sgd_momentum": "sgd"}


class _Same:
    """A dataset that returns the same sequence every time."""

    def __init__(self, one: dict[str, Tensor], count: int) -> None:
        self._one, self._count = one, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, _: int) -> dict[str, Tensor]:
        return dict(self._one)


def run(setup: Setup, observer: Observer) -> None:
    """Build the trainer as its documentation does, train, and evaluate if the setup says so."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = _built(setup, folder)
        sampled = setup.task and TASKS[setup.task].sample == "prompt"
        with without_files(), all_fetched(setup), sampling.in_few_steps(setup) if sampled else nullcontext():
            trainer.add_callback(saving := Saving(observer))
            trainer.train()
            if setup.evaluate:
                trainer.args.prediction_loss_only = True
                trainer.evaluate()
            if setup.save and setup.resume and not setup.deepspeed:  # whose engine reads and writes files of its own
                resume(trainer, saving, observer, folder)
        if setup.merge and setup.method != "full":
            observer.mark("merge", "merging the adapters")
            merge(setup, trainer.model)


class _Batches(list[Any]):
    """The micro-batches of a step that run, and the inputs of those `beside` them."""

    beside: list[list[Tensor]]


@contextmanager
def all_fetched(setup: Setup) -> Iterator[None]:
    """Keep the inputs of all micro-batches of a step on the card, as transformers does before the first one runs."""
    fetch = Trainer.get_batch_samples

    def fetched(self: Any, *words: Any) -> tuple[list[Any], Any]:
        found, items = fetch(self, *words)
        batches = _Batches(found)
        one = found[-1].values() if found and isinstance(found[-1], Mapping) else ()
        more = setup.fetched - len(found)
        batches.beside = [[v.clone() for v in one if isinstance(v, Tensor) and v.is_cuda] for _ in range(more)]
        return batches, items

    with patched(Trainer, {"get_batch_samples": fetched}):
        yield


def _built(setup: Setup, folder: str) -> Any:
    """Return the trainer of the job."""
    if setup.task and TASKS[setup.task].sample == "anchor":
        return _contrasting(setup, folder)
    if setup.trainer != "trl":
        return _plain(setup, folder)
    made = _by_trl(setup, folder)
    if setup.widen:
        widen(made.model)
    return made


def _by_trl(setup: Setup, folder: str) -> Any:
    if not setup.task:
        return _sft(setup, folder)
    if TASKS[setup.task].sample == "pictures":
        return _with_pictures(setup, folder)
    if TASKS[setup.task].sample == "prompt":
        return sampling.build(setup, _arguments(setup, folder), _count(setup))
    return _preferring(setup, folder)


def _arguments(setup: Setup, folder: str) -> dict[str, Any]:
    words: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": setup.micro_batch,
        "per_device_eval_batch_size": setup.micro_batch, "max_steps": setup.steps,
        "gradient_accumulation_steps": setup.accumulation, "report_to": [],
        "save_strategy": "steps" if setup.save else "no", "save_steps": setup.steps,
        "logging_strategy": "no", "disable_tqdm": True, "remove_unused_columns": False, "max_grad_norm": setup.clip,
        "bf16": setup.autocast == "bf16", "fp16": setup.autocast == "fp16",
        "optim": _OPTIM.get(setup.optimizer, setup.optimizer), "gradient_checkpointing": setup.checkpointing != "none",
        "torch_compile": setup.compile,
    }  # fmt: skip
    if setup.checkpointing != "none":
        words["gradient_checkpointing_kwargs"] = dict(CHECKPOINTING[setup.checkpointing])
    if setup.world_size > 1 and setup.shard == "parameters":
        words["fsdp"] = True
        words["fsdp_config"] = {
            "version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "reshard_after_forward": setup.reshard,
            "cpu_offload": setup.offload, "cpu_ram_efficient_loading": setup.loading == "sharded",
            "transformer_layer_cls_to_wrap": BLOCKS.get(str(setup.config.get("model_type"))),
        }  # fmt: skip
    if setup.deepspeed:
        words["deepspeed"] = setup.deepspeed
    return words | deepcopy(setup.arguments)  # Trainer writes into them, and a setup is run at several depths


def _count(setup: Setup) -> int:
    """Return the number of samples for all ranks, enough that no epoch ends within an accumulation."""
    return setup.world_size * setup.micro_batch * setup.accumulation * (setup.steps + 2)


def _evaluated(setup: Setup) -> int:
    """Return the number of samples to evaluate on, for all ranks."""
    return setup.world_size * setup.micro_batch * EVALUATED


def _plain(setup: Setup, folder: str) -> Any:
    from transformers import TrainingArguments

    one, arguments = sample(setup), TrainingArguments(**_arguments(setup, folder))
    model = load(setup)  # after the arguments, so that ZeRO-3 shards it while loading
    if setup.method != "full":
        model = with_adapters(setup, model)
    evaluated = _Same(one, _evaluated(setup)) if setup.evaluate else None
    return Trainer(model=model, args=arguments, train_dataset=_Same(one, _count(setup)), eval_dataset=evaluated)


def _sft(setup: Setup, folder: str) -> Any:
    import datasets
    from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

    one = sample(setup)
    # every second sequence is shorter, so that the collator pads it
    ends = [None, -min(8, setup.sequence // 2) if setup.mask == "padded" else None]
    rows = {name: [one[name][: ends[i % 2]].tolist() for i in range(_count(setup))] for name in ("input_ids", "labels")}
    if setup.packing:  # as TRL's packing leaves them
        rows["seq_lengths"] = [[setup.sequence - setup.sequence // 2, setup.sequence // 2]] * _count(setup)
    data = datasets.Dataset.from_dict(rows)
    settings = _arguments(setup, folder) | {
        "max_length": setup.sequence, "packing": setup.packing, "dataset_kwargs": {"skip_prepare_dataset": True}
    }  # fmt: skip
    adapters = {} if setup.method == "full" else {"peft_config": adapter_config(setup)}
    return SFTTrainer(
        args=SFTConfig(**settings), model=load(setup), train_dataset=data,
        eval_dataset=data.select(range(_evaluated(setup))) if setup.evaluate else None,
        processing_class=words(), **adapters,
    )  # fmt: skip


def _with_pictures(setup: Setup, folder: str) -> Any:
    """Build TRL's SFTTrainer on texts with images, which are processed beforehand: its collator reads image files."""
    import datasets
    from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

    from memfit.virtual.jobs import pictures

    config = config_of(setup)
    one, processor = pictures.batch_of_one(setup, config), pictures.processor_of(config)
    data = datasets.Dataset.from_list([{"images": [], "text": ""}] * _count(setup))
    adapters = {} if setup.method == "full" else {"peft_config": adapter_config(setup)}
    return SFTTrainer(
        args=SFTConfig(**_arguments(setup, folder) | {"max_length": setup.sequence, "packing": setup.packing}),
        model=load(setup), train_dataset=data, processing_class=processor,
        data_collator=lambda rows: pictures.collated(one, len(rows), setup.mask == "padded"),
        eval_dataset=data.select(range(_evaluated(setup))) if setup.evaluate else None, **adapters,
    )  # fmt: skip


def _preferring(setup: Setup, folder: str) -> Any:
    """Build a trainer of TRL other than SFTTrainer."""
    import datasets

    row, model = TASKS[setup.task], load(setup)
    given: dict[str, Any] = {}
    if setup.method != "full":
        given["peft_config"] = adapter_config(setup)
    elif row.beside:
        given["ref_model"] = load(setup)
    rows = [compared(setup), compared(setup, good=False)] * (_count(setup) // 2 + 1)
    data = datasets.Dataset.from_list(rows)
    # the data is text, whose columns the trainer drops itself
    settings = _arguments(setup, folder) | {"max_length": setup.sequence, "remove_unused_columns": True}
    return of_trl(row, "Trainer")(
        args=of_trl(row, "Config")(**settings), model=model, train_dataset=data,
        eval_dataset=data.select(range(_evaluated(setup))) if setup.evaluate else None,
        processing_class=words(), **given,
    )  # fmt: skip


def _contrasting(setup: Setup, folder: str) -> Any:
    """Build sentence-transformers' trainer: each text is compared with the answers of the whole batch."""
    import datasets
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    model = _encoder(setup)
    if setup.method != "full":
        model.add_adapter(adapter_config(setup))
        widen(model)
    data = datasets.Dataset.from_list([compared(setup)] * _count(setup))
    settings = {name: value for name, value in _arguments(setup, folder).items() if name != "remove_unused_columns"}
    trainer = SentenceTransformerTrainer(
        model=model, args=SentenceTransformerTrainingArguments(**settings), train_dataset=data,
        eval_dataset=data.select(range(_evaluated(setup))) if setup.evaluate else None,
        loss=MultipleNegativesRankingLoss(model),
    )  # fmt: skip
    if setup.mask == "padded":
        collator = trainer.data_collator
        collator.preprocess_fn = partial(_with_a_shorter_text, collator.preprocess_fn, padding_of(setup))
    return trainer


def _with_a_shorter_text(preprocess: Callable[..., Any], short: int, texts: list[str], **given: Any) -> Any:
    """Return a column of tokenized texts whose last one ends `short` tokens before the others."""
    made = preprocess(texts, **given)
    made["attention_mask"][-1, made["attention_mask"].shape[1] - short :] = 0
    return made


def _encoder(setup: Setup) -> Any:
    """Return the encoder with a pooling layer, read from a folder as sentence-transformers reads one."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Pooling, Transformer

    config, dtype = config_of(setup), DTYPES[setup.dtype]
    given: dict[str, Any] = {"dtype": dtype, **quantization_of(setup)}
    if setup.attention != "sdpa":
        given["attn_implementation"] = setup.attention
    with tempfile.TemporaryDirectory() as folder, hollow_files():
        checkpoint(config, dtype, Path(folder), class_of(config, setup.task).from_config)
        words().save_pretrained(folder)
        encoder = Transformer(folder, max_seq_length=setup.sequence, model_kwargs=given)
    return SentenceTransformer(modules=[encoder, Pooling(config.get_text_config().hidden_size)], device="cuda")
