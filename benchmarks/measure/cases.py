"""The table of runs: models with random weights under every trainer, each a Setup or a task's function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from measure.drawn import recipe_of, rows, shape_of
from measure.tasks import TASKS
from memfit import Recipe
from memfit.catalogue import config, names
from memfit.nouns.task import PLAIN, Shape
from memfit.tables.adapters import ADAPTERS
from memfit.virtual.jobs import import_libraries, run
from memfit.virtual.jobs.recipe import Setup, setup_of
from memfit.virtual.observer import Observer

NESTED = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@dataclass(frozen=True, slots=True)
class Case:
    """One run. words: arguments of Setup, or changes to the recipe's; alloc_conf: of PyTorch's allocator.

    recipe: the job as `plan` writes it, so that the closed form can be compared too.
    kind, shape: the task that `plan` traces (a row of tables/tasks.py) and one sample of it; "": a language model.
    shared: the card may be shared with other cases, as nobody looks at the times.
    slow: collectives keep their stream busy for as long as a network would.
    task: what is run instead of a Setup; such a case names no model of the catalogue.
    """

    name: str
    model: str
    words: dict[str, Any] = field(default_factory=dict)
    alloc_conf: str = ""
    recipe: Recipe | None = None
    kind: str = ""
    shape: Shape = PLAIN
    shared: bool = False
    slow: bool = False
    task: Callable[[], None] | None = None

    @property
    def initialised(self) -> bool:
        """Return whether the weights must be numbers before training: some adapters decompose them."""
        return self.recipe is not None and self.recipe.adapter != "lora"

    @property
    def alone(self) -> bool:
        """Return whether the case has the card to itself, so that its steps can be timed."""
        if self.recipe is None or self.kind or self.shared:
            return False
        return ADAPTERS[self.recipe.adapter].by_formula

    @property
    def world_size(self) -> int:
        """Return the number of ranks, of which the case is rank 0."""
        return 1 if self.task else self.setup().world_size

    def prepare(self) -> None:
        """Import what the case needs."""
        if self.task is None:
            import_libraries(self.setup())

    def run(self, observer: Observer) -> None:
        """Run the case on the card that `cuda` is."""
        if self.task is not None:
            self.task()
        else:
            run(self.setup(), observer)

    def setup(self) -> Setup:
        """Return the job of the case."""
        entry = names.find(self.model)
        assert entry is not None, self.model
        if self.recipe is not None:
            job = setup_of(self.recipe, dict(config(entry)), self.kind, self.shape)
            return replace(job, **{"save": False, "merge": False, "steps": 3, **self.words})
        return Setup(config=dict(config(entry)), **{"load": "device", "sequence": 512, **self.words})


def _cases() -> list[Case]:
    found: list[Case] = []

    def add(name: str, model: str, alloc_conf: str = "", **words: Any) -> None:
        found.append(Case(name, model, words, alloc_conf))

    small = ("qwen2.5-0.5b", "llama-3.2-1b", "gpt2", "smollm2-135m", "pythia-160m")
    for model in small:
        add(f"loop {model}", model, trainer="torch", optimizer="adamw_torch")
        add(f"trainer {model}", model, trainer="transformers", dtype="fp32", autocast="bf16", micro_batch=2)
        add(
            f"sft {model} lora",
            model,
            trainer="trl",
            method="lora",
            autocast="bf16",
            checkpointing="nonreentrant",
            micro_batch=4,
        )
    one = "qwen2.5-0.5b"
    for sequence in (128, 1024, 2048, 4096):
        add(f"loop length {sequence}", one, trainer="torch", sequence=sequence)
    for optimizer in (
        "adamw_torch",
        "adamw_forloop",
        "sgd_momentum",
        "adafactor",
        "adamw_bnb_8bit",
        "paged_adamw_8bit",
    ):
        add(f"loop {optimizer}", one, trainer="torch", optimizer=optimizer)
    for kind in ("none", "nonreentrant", "reentrant"):
        add(
            f"trainer checkpointing {kind}",
            one,
            trainer="transformers",
            autocast="bf16",
            checkpointing=kind,
            micro_batch=4,
        )
    for attention in ("eager", "sdpa"):
        for mask in ("ones", "padded"):
            add(f"loop {attention} {mask}", one, trainer="torch", attention=attention, mask=mask, micro_batch=2)
    add("sft expandable", one, "expandable_segments:True", trainer="trl", autocast="bf16", micro_batch=2)
    add("sft max_split", one, "max_split_size_mb:128", trainer="trl", autocast="bf16", micro_batch=2)
    add("sft qlora", one, trainer="trl", method="qlora", load="checkpoint", quantization=NESTED, autocast="bf16")
    add(
        "trainer qlora",
        one,
        trainer="transformers",
        method="qlora",
        load="checkpoint",
        quantization=NESTED,
        autocast="bf16",
    )
    add("trainer accumulation", one, trainer="transformers", autocast="bf16", accumulation=3)
    add("trainer evaluate", one, trainer="transformers", autocast="bf16", evaluate=True)
    add("loop fp16", one, trainer="torch", dtype="fp32", autocast="fp16")
    return found


LONG = Recipe(method="lora", sequence_length=2048, micro_batch=4, checkpointing="full", loss="fused")
FULL = Recipe(sequence_length=2048, micro_batch=2, checkpointing="full", loss="fused")
# jobs of the size that people run on a card of 80 GB, as `plan` writes them
RECIPES: dict[str, tuple[str, Recipe]] = {
    "8b lora": ("llama-3.1-8b", LONG),
    "8b lora transformers": ("llama-3.1-8b", LONG.but(trainer="transformers", loss="full")),
    "8b lora without checkpointing": ("llama-3.1-8b", LONG.but(checkpointing="none", micro_batch=2)),
    "8b qlora": ("llama-3.1-8b", LONG.but(method="qlora", quantization="nf4-double", sequence_length=4096)),
    "8b full 8-bit": ("llama-3.1-8b", FULL.but(optimizer="adamw-8bit")),
    "8b full that runs out of memory": ("llama-3.1-8b", FULL.but(precision="fp32")),
    "4b full mixed": ("qwen3-4b", FULL.but(precision="bf16-mixed")),
    "4b full mixed expandable": (
        "qwen3-4b", FULL.but(precision="bf16-mixed", alloc_conf="expandable_segments:True")
    ),
    "4b full long": ("qwen3-4b", FULL.but(sequence_length=16384, micro_batch=1, optimizer="adamw-8bit")),
    "gemma 2b full": ("gemma-2-2b", FULL.but(trainer="transformers", loss="full", attention="eager")),
    "gemma-3 1b full": ("gemma-3-1b", FULL.but(micro_batch=4)),
    "1b full accumulated": ("llama-3.2-1b", FULL.but(precision="bf16-mixed", accumulation=4, micro_batch=8)),
    "1b full paged": ("llama-3.2-1b", FULL.but(optimizer="paged-adamw-8bit", checkpointing="none", micro_batch=4)),
    "1b full packed": ("llama-3.2-1b", FULL.but(padding="packing", checkpointing="none")),
    "1b full compiled": ("llama-3.2-1b", FULL.but(compile=True, checkpointing="none")),
    "1b full selective": ("llama-3.2-1b", FULL.but(checkpointing="selective")),
    "1b full liger": (
        "llama-3.2-1b", FULL.but(trainer="transformers", precision="bf16-mixed", checkpointing="none", micro_batch=4)
    ),
    "moe 14b lora": ("qwen1.5-moe-a2.7b", LONG.but(loss="full", trainer="transformers")),
    "phi lora fp16": ("phi-3.5-mini", LONG.but(precision="fp16-mixed")),
}  # fmt: skip
# rank 0 of 8: PyTorch's fake process group moves nothing, while streams, events and copies are the card's own
SHARDED: dict[str, tuple[str, Recipe]] = {
    "fsdp2 8b": ("llama-3.1-8b", FULL.but(trainer="torch", loss="full", shard="parameters", precision="bf16-mixed")),
    "fsdp2 1.7b trl": ("qwen3-1.7b", FULL.but(shard="parameters", precision="bf16-mixed")),
    "fsdp2 1.7b lora": ("qwen3-1.7b", LONG.but(shard="parameters")),
    "ddp 1.7b": ("qwen3-1.7b", FULL.but(precision="bf16-mixed")),
    "ddp 1.7b lora": ("qwen3-1.7b", LONG),
    "zero2 1.7b": ("qwen3-1.7b", FULL.but(precision="bf16-master", shard="gradients")),
    "zero3 1.7b": ("qwen3-1.7b", FULL.but(precision="bf16-master", shard="parameters")),
    "zero3 1.7b offloaded": (
        "qwen3-1.7b", FULL.but(precision="bf16-master", shard="parameters", offload="optimizer")
    ),
}  # fmt: skip
# what `plan` traces, because no formula counts it: every adapter of PEFT that it runs, and the tasks
ADAPTED = Recipe(method="lora", sequence_length=1024, micro_batch=2, checkpointing="none", loss="full")
TRAINER = Recipe(sequence_length=512, micro_batch=2, checkpointing="none", trainer="transformers", loss="full")
SEEN = Recipe(method="lora", sequence_length=2560, micro_batch=2, checkpointing="full", trainer="trl", loss="full")
DRAWN = Recipe(method="lora", micro_batch=2, checkpointing="none", trainer="torch", loss="full")
PREFERRED = Recipe(sequence_length=1024, micro_batch=2, checkpointing="full", trainer="trl", loss="full")
SAMPLED = PREFERRED.but(method="lora", micro_batch=8)
# 1,024 tokens were asked for on the H200; without a space between them prompt and answer shared one
JOINED = PREFERRED.but(sequence_length=1023)
TWO, WIDE = Shape(images=2, image=(1024, 768)), Shape(image=(1024, 1024))
ANSWERS = Shape(prompt=256, completion=128)
TASKS_PLANNED: dict[str, tuple[str, str, Recipe, Shape]] = {
    **{
        f"{model} {images.images} images": (model, "image-text", SEEN, images)
        for model in ("qwen2.5-vl-3b", "qwen2-vl-2b", "qwen3-vl-2b", "gemma-3-4b")
        for images in (Shape(), TWO)
    },
    "qwen2.5-vl-3b qlora": ("qwen2.5-vl-3b", "image-text", SEEN.but(method="qlora", quantization="nf4"), TWO),
    "qwen2-vl-2b full": ("qwen2-vl-2b", "image-text", SEEN.but(method="full", optimizer="adamw-8bit"), TWO),
    "sd 1.5": ("stable-diffusion-v1-5", "text-to-image", DRAWN.but(micro_batch=4), PLAIN),
    "sd 1.5 full": ("stable-diffusion-v1-5", "text-to-image", DRAWN.but(method="full", precision="fp16-mixed"), PLAIN),
    "sd 2.1": ("stable-diffusion-2-1", "text-to-image", DRAWN.but(micro_batch=4), PLAIN),
    "sdxl": ("stable-diffusion-xl-base-1.0", "text-to-image", DRAWN, PLAIN),
    "sdxl full": (
        "stable-diffusion-xl-base-1.0", "text-to-image",
        DRAWN.but(method="full", optimizer="adamw-8bit", checkpointing="full"), WIDE,
    ),
    "sd3": ("stable-diffusion-3-medium", "text-to-image", DRAWN.but(checkpointing="full"), PLAIN),
    "flux": ("flux.1-dev", "text-to-image", DRAWN.but(micro_batch=1, checkpointing="full"), PLAIN),
    "minilm": ("bert-base-uncased", "embedding", TRAINER.but(micro_batch=32), PLAIN),
    "t5-xl": ("flan-t5-xl", "seq2seq", TRAINER.but(method="lora", checkpointing="full", micro_batch=8), PLAIN),
    "whisper-large-v3": ("whisper-large-v3", "speech", TRAINER.but(checkpointing="full", micro_batch=8), PLAIN),
    "vit": ("vit-base-patch16-224", "image-classification", TRAINER.but(micro_batch=32), PLAIN),
    "deberta": ("deberta-v3-base", "classification", TRAINER.but(micro_batch=16), PLAIN),
    "llama classification": ("llama-3.2-1b", "classification", TRAINER.but(method="lora"), PLAIN),
    "llama reward": ("llama-3.2-1b", "reward", PREFERRED, PLAIN),
    "llama dpo": ("llama-3.2-1b", "dpo", JOINED, PLAIN),
    "llama dpo lora": ("llama-3.2-1b", "dpo", JOINED.but(method="lora"), PLAIN),
    "llama kto": ("llama-3.2-1b", "kto", JOINED.but(method="lora"), PLAIN),
    "llama orpo": ("llama-3.2-1b", "orpo", JOINED.but(method="lora"), PLAIN),
    "llama grpo": ("llama-3.2-1b", "grpo", SAMPLED, ANSWERS),
    "llama grpo full": ("llama-3.2-1b", "grpo", SAMPLED.but(method="full", optimizer="adamw-8bit"), ANSWERS),
    "llama rloo": ("llama-3.2-1b", "rloo", SAMPLED, ANSWERS),
}  # fmt: skip
PLANNED: tuple[Case, ...] = (
    *(
        Case(
            f"adapter {key}",
            "llama-3.2-1b",
            {"load": "device"},  # where adapters that decompose weights do so
            recipe=ADAPTED.but(adapter=key, lora_rank=row.usual, **({"trainer": row.trainer} if row.trainer else {})),
        )
        for key, row in ADAPTERS.items()
        if not row.refused[0]
    ),
    *(
        Case(f"planned {name}", model, recipe=recipe, kind=kind, shape=shape)
        for name, (model, kind, recipe, shape) in TASKS_PLANNED.items()
    ),
)
CASES: tuple[Case, ...] = (
    *_cases(),
    *(Case(name, model, alloc_conf=recipe.alloc_conf, recipe=recipe) for name, (model, recipe) in RECIPES.items()),
    *(
        Case(f"{name}{', slow network' if slow else ''}", model, recipe=recipe.but(num_gpus=8), slow=slow)
        for name, (model, recipe) in SHARDED.items()
        for slow in (False, True)
        if not (slow and "ddp" in name)  # its collectives are C++'s own
    ),
    *(Case(name, "", task=task) for name, task in TASKS.items()),
    *PLANNED,
    *(
        Case(
            f"drawn {number:03}", row["model"], alloc_conf=recipe_of(row).alloc_conf, recipe=recipe_of(row),
            kind=row["task"], shape=shape_of(row), shared=True,
        )
        for number, row in enumerate(rows())
    ),
)  # fmt: skip
