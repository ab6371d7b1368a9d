"""How the trainer of each task runs the model, where that is not one forward and backward of the language model's loss.

Sources: TRL 1.16 (DPOTrainer._compute_loss, KTOTrainer._compute_loss, RewardTrainer.compute_loss), transformers 5.23.
"""

from __future__ import annotations

from dataclasses import dataclass

from memfit.models.families.towers import CLASSIFIERS
from memfit.models.families.towers import IN_TEXT as TOWERS
from memfit.nouns.architecture import Architecture
from memfit.nouns.job import Recipe
from memfit.nouns.task import Task
from memfit.tables.adapters import adapter
from memfit.tables.combinations import NOT_BY_TRL
from memfit.tables.tasks import TASKS

# decoders with a class for sequences in transformers 5.23, all of which were compared
SCORED = frozenset((
    "arcee", "bloom", "deepseek_v2", "deepseek_v3", "exaone4", "falcon", "gemma", "gemma2", "gemma3_text", "glm",
    "glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "hunyuan_v1_dense", "llama",
    "ministral3", "mistral", "mixtral", "mpt", "nemotron", "olmo", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_5_text", "qwen3_moe", "qwen3_next", "seed_oss", "smollm3", "stablelm", "starcoder2",
))  # fmt: skip
# decoders whose last hidden states were compared as embeddings
EMBEDDED = frozenset(("llama", "mistral", "qwen2", "qwen3"))
# dense decoders whose sampling was compared
SAMPLING = frozenset((
    "apertus", "bloom", "cohere", "cohere2", "falcon", "gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2",
    "gpt_bigcode", "gpt_neox", "gptj", "granite", "hunyuan_v1_dense", "llama", "ministral3", "mistral", "nemotron",
    "olmo", "olmo2", "olmo3", "opt", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2",
))  # fmt: skip
ENCODERS = frozenset(("bert", "camembert", "distilbert", "modernbert", "roberta", "xlm-roberta"))
# TRL's disable_dropout sets p of every nn.Dropout to 0, and reaches no p that a module passes to F.dropout itself
_OWN_P = frozenset(("bloom", "falcon", "opt", "starcoder2"))  # of hidden states
_MODULE_P = frozenset(("bloom", "falcon", "gpt2", "gpt_neo", "gptj"))  # attention's is a module
_METHODS = ("full", "lora", "qlora")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRun:
    """One row: the batch, the head, and the passes beside forward and backward."""

    rows: int = 1  # texts of one sample, which lie in one batch
    columns: int = 1  # texts of one sample, each of which lies in a batch of its own; the batches run one by one
    head: str = ""  # a row of layers.head.LOSSES, or "ranking" (layers.columns); "": that of the trainer for --loss
    labelled: float = 1.0  # share of the tokens that are learned
    indices: int = 3  # tensors of token ids, labels and masks in a batch
    # a pass without gradients while the graph of the forward is alive: the model without its adapters, or, where all
    # weights are trained, a second model
    reference: bool = False
    sampled: bool = False  # the model writes the answers before each step, all of them at once
    kbit_prepare: bool = True  # False: a quantised model is not prepared (Trainer.kbit_prepare)
    dropout: bool = True  # False: the trainer switches the model's dropout off
    families: frozenset[str] = frozenset()  # model types for which it holds; empty: all causal language models
    methods: tuple[str, ...] = _METHODS


_PLAIN = TaskRun()
TASK_RUNS: dict[str, TaskRun] = {
    "image-text": TaskRun(indices=4, families=frozenset(TOWERS)),
    "image-classification": TaskRun(head="classes", indices=0, families=frozenset(CLASSIFIERS)),
    "masked-lm": TaskRun(families=ENCODERS),
    "classification": TaskRun(head="classes", families=SCORED | ENCODERS),
    "token-classification": TaskRun(head="classes", families=ENCODERS),
    "reward": TaskRun(rows=2, head="classes", dropout=False, indices=2, families=SCORED),
    "dpo": TaskRun(rows=2, head="fused", labelled=0.5, reference=True, dropout=False),
    "kto": TaskRun(head="fused", labelled=0.5, reference=True, dropout=False, indices=6),
    "grpo": TaskRun(head="fused", sampled=True, indices=4, families=SAMPLING),
    "rloo": TaskRun(head="fused", sampled=True, indices=4, families=SAMPLING),
    "seq2seq": TaskRun(indices=2, families=frozenset(("mt5", "t5"))),
    "embedding": TaskRun(columns=2, head="ranking", indices=4, kbit_prepare=False, families=ENCODERS | EMBEDDED),
    "speech": TaskRun(indices=0, families=frozenset(("whisper",))),
    "orpo": TaskRun(rows=2, head="odds", dropout=False, indices=8, methods=("full", "lora")),
}  # fmt: skip


def run_of(architecture: Architecture) -> TaskRun:
    """Return how a model's task is run."""
    return TASK_RUNS.get(architecture.trained_for, _PLAIN)


def drops(architecture: Architecture) -> tuple[bool, bool]:
    """Return whether dropout is active in training, of hidden states and of attention."""
    on, family = run_of(architecture).dropout, architecture.model_type
    return on or family in _OWN_P, on or family not in _MODULE_P


def learned_share(architecture: Architecture, sequence: int) -> float:
    """Return the share of the positions with a successor whose token is learned."""
    run = run_of(architecture)
    return architecture.shape.completion / max(sequence - 1, 1) if run.sampled else run.labelled


def second_model(architecture: Architecture) -> bool:
    """Return whether a reference model is resident where all weights are trained."""
    run, shape = run_of(architecture), architecture.shape
    return run.reference or (run.sampled and (shape.reference or bool(TASKS[architecture.trained_for].beside)))


def counted(recipe: Recipe) -> bool:
    """Return whether the closed form counts the adapters of a recipe; of DoRA without dropout, on one card."""
    if recipe.method == "full":
        return True
    plain = recipe.adapter != "dora" or (not recipe.lora_dropout and recipe.num_gpus == 1 and recipe.offload == "none")
    return adapter(recipe.adapter).by_formula and plain


def by_formula(task: Task, architecture: Architecture, recipe: Recipe, method: str | None = None) -> bool:
    """Return whether the closed form answers for a task on a model; the trace answers for what it does not.

    `method`: the one that a plan takes; "auto": it may take each, None: the recipe's. Beyond the tasks of language
    models one card was compared with the trace, without offloading.
    """
    method = method or recipe.method
    if not counted(recipe) or (architecture.trainable_memory and task.sample != "image"):
        return False
    if task.language:
        return True
    row = TASK_RUNS.get(task.key)
    if row is None or recipe.num_gpus > 1 or recipe.offload != "none" or architecture.model_type in NOT_BY_TRL:
        return False
    if task.sample in ("image", "pictures") and recipe.attention != "sdpa":
        return False
    known = architecture.model_type in row.families if row.families else architecture.task == "causal-lm"
    return known and set(_METHODS if method == "auto" else (method,)) <= set(row.methods)
