"""transformers' Trainer and TRL's SFTTrainer, unmodified."""

from __future__ import annotations

import tempfile
from typing import Any

from torch import Tensor

from memfit.frameworks.process_layout import BLOCKS
from memfit.virtual.jobs.checkpoints import Saving, resume, without_files
from memfit.virtual.jobs.models import load
from memfit.virtual.jobs.parts import CHECKPOINTING, lora_config, sample, with_adapters
from memfit.virtual.jobs.setup import Setup
from memfit.virtual.observer import Observer

EVALUATED = 2  # batches; from the second on each finds the memory as the one before left it
_OPTIM = {"adamw_forloop": "adamw_torch", "sgd_momentum": "sgd"}


class _Same:
    """A dataset that gives the same sequence every time."""

    def __init__(self, one: dict[str, Tensor], count: int) -> None:
        self._one, self._count = one, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, _: int) -> dict[str, Tensor]:
        return dict(self._one)


def run(setup: Setup, observer: Observer) -> None:
    """Build the trainer as its documentation does, train, evaluate if asked."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = (_sft if setup.trainer == "trl" else _plain)(setup, folder)
        with without_files():
            trainer.add_callback(saving := Saving(observer))
            trainer.train()
            if setup.evaluate:
                trainer.args.prediction_loss_only = True
                trainer.evaluate()
            if setup.save and not setup.deepspeed:  # its engine reads and writes files of its own
                resume(trainer, saving, observer, folder)
        if setup.merge and setup.method != "full":
            observer.mark("merge", "merging the adapters")
            trainer.model.merge_and_unload()


def _arguments(setup: Setup, folder: str) -> dict[str, Any]:
    words: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": setup.micro_batch,
        "per_device_eval_batch_size": setup.micro_batch, "max_steps": setup.steps,
        "gradient_accumulation_steps": setup.accumulation, "report_to": [], "save_strategy": "steps" if setup.save else "no", "save_steps": setup.steps,
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
            "cpu_offload": setup.offload, "cpu_ram_efficient_loading": False,
            "transformer_layer_cls_to_wrap": BLOCKS.get(str(setup.config.get("model_type"))),
        }  # fmt: skip
    if setup.deepspeed:
        words["deepspeed"] = setup.deepspeed
    return words | setup.arguments


def _count(setup: Setup) -> int:
    """Samples to train on, of all ranks: an epoch that ends early cuts an accumulation short."""
    return setup.world_size * setup.micro_batch * setup.accumulation * (setup.steps + 2)


def _evaluated(setup: Setup) -> int:
    """Samples to evaluate on, of all ranks."""
    return setup.world_size * setup.micro_batch * EVALUATED


def _plain(setup: Setup, folder: str) -> Any:
    from transformers import Trainer, TrainingArguments

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
    if setup.packing:  # TRL's packing has been over them
        rows["seq_lengths"] = [[setup.sequence - setup.sequence // 2, setup.sequence // 2]] * _count(setup)
    data = datasets.Dataset.from_dict(rows)
    words = _arguments(setup, folder) | {
        "max_length": setup.sequence, "packing": setup.packing, "dataset_kwargs": {"skip_prepare_dataset": True}
    }  # fmt: skip
    adapters = {} if setup.method == "full" else {"peft_config": lora_config(setup)}
    made: Any = SFTTrainer(
        args=SFTConfig(**words), model=load(setup), train_dataset=data,
        eval_dataset=data.select(range(_evaluated(setup))) if setup.evaluate else None,
        processing_class=_tokenizer(), **adapters,
    )  # fmt: skip
    for p in made.model.parameters() if setup.widen else ():
        if p.requires_grad:
            p.data = p.data.float()
    return made


def _tokenizer() -> Any:
    """A tokenizer of three words: the data is tokenized already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1, "<s>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", eos_token="<s>")
