"""sentence-transformers' trainer with in-batch negatives: each text is compared with the answers of the whole batch."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from memfit.virtual.jobs.models import (
    DTYPES,
    adapter_config,
    checkpoint,
    class_of,
    config_of,
    hollow_files,
    quantization_of,
)
from memfit.virtual.jobs.recipe import Setup
from memfit.virtual.jobs.tasks import compared, padding_of, words


def build(setup: Setup, arguments: dict[str, Any], count: int, evaluated: int) -> Any:
    """Return the trainer. arguments: those of every trainer; count, evaluated: samples to train and to evaluate on."""
    import datasets
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    model = _model(setup)
    if setup.method != "full":
        model.add_adapter(adapter_config(setup))
        for weight in model.parameters():
            if weight.requires_grad:
                weight.data = weight.data.float()
    data = datasets.Dataset.from_list([compared(setup)] * count)
    settings = {name: value for name, value in arguments.items() if name != "remove_unused_columns"}
    trainer = SentenceTransformerTrainer(
        model=model, args=SentenceTransformerTrainingArguments(**settings), train_dataset=data,
        eval_dataset=data.select(range(min(evaluated, count))) if setup.evaluate else None,
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


def _model(setup: Setup) -> Any:
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
