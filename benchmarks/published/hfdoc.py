"""Rows of the Hugging Face guide "efficient training on one GPU": BERT-large classifying random 512-token texts."""

from __future__ import annotations

import re
from dataclasses import replace

import published.profiles.legacy  # noqa: F401  registers the code of PyTorch 1.10
from memfit.catalogue import config, names
from memfit.models.families import architecture
from memfit.nouns.job import Recipe
from memfit.tables.trainers import trainer
from published.case import Case, NotCovered, accumulation, compared_of, fixed_length, gpu_of, one_gpu, optimizer_of
from published.rows import Row

# transformers.AdamW goes weight by weight in Python
OPTIMIZERS = (
    (r"^AdamW \(HF\)", "adamw-forloop"), (r"^Adafactor", "adafactor"), (r"^bnb Adam8bit", "adamw-8bit"),
)  # fmt: skip


def case(row: Row) -> Case:
    """A row as a Case. Raises NotCovered."""
    one_gpu(row)
    if "sequence classification" not in row.model:
        raise NotCovered(f"{row.model} under a plain transformers Trainer")
    entry = names.find(row.model.split()[0])
    if entry is None:
        raise NotCovered(f"model {row.model} is not in the catalogue")
    classifier = {**config(entry), "architectures": ["BertForSequenceClassification"]}
    recipe = Recipe(
        method="full", precision="fp16-mixed" if "AMP" in row.weight_dtype else "fp32",
        optimizer=optimizer_of(OPTIMIZERS, row.optimizer),
        micro_batch=row.number("micro_batch", 1), accumulation=accumulation(row), sequence_length=fixed_length(row),
        checkpointing="full" if row.checkpointing == "on" else "none", attention="eager", trainer="transformers",
    )  # fmt: skip
    gpu = gpu_of(row)
    context = re.search(r"context alone measured (\d+) MiB", row.notes)
    if context:
        gpu = replace(gpu, context_bytes=int(context[1]) << 20)
    # the embeddings got 8-bit states too: transformers 4.16 registered none of them for 32 bits
    torch = row.version("torch")
    profile = replace(
        trainer("transformers"), embeddings_32bit=False, zeroes_gradients=(0,) < torch < (2,),
        code="torch<1.11" if (0,) < torch < (1, 11) else "transformers",
    )  # fmt: skip
    return Case(
        architecture=architecture(classifier, row.model), recipe=recipe, gpu=gpu, profile=profile,
        compared=compared_of(row), torch=torch,
    )  # fmt: skip
