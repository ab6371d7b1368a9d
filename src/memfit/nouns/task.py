"""The nouns Task (what is trained, with which data and trainer) and Shape (how large one sample of it is)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SampleKind = Literal[
    "text", "label", "token-labels", "text-to-text", "image", "features", "waveform", "pair", "choice", "prompt",
    "anchor", "pictures", "noise",
]  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One row of tables/tasks.py: what a task needs of a model, and what runs it."""

    key: str  # value of --task
    title: str  # "image classification"
    auto: str  # transformers' class that builds the model: "AutoModelForImageClassification"
    mapping: str  # transformers' table of the models that can do it: "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"
    trainer: str  # "transformers", "torch" for a loop of its own, or the name of TRL's trainer without "Trainer"
    sample: SampleKind
    module: str = "trl"  # of TRL's trainer
    unit: str = "samples"  # what a batch counts
    peft: str = ""  # PEFT's task type; "": none
    head: str = ""  # a new module of the model that is trained whole beside adapters, where PEFT does not know it
    beside: str = ""  # what else is resident, where the whole model is trained
    rates: tuple[str, str] = ("2e-5", "2e-4")  # learning rates of written files: all weights, adapters
    least: int = 1  # smallest micro-batch that the trainer runs
    package: str = ""  # what it needs beside the training libraries
    caveat: str = ""  # what the user must know of the figure

    @property
    def new_modules(self) -> tuple[str, ...]:
        """Return the modules that no checkpoint has: bitsandbytes cannot quantise them, and they are trained whole."""
        if self.peft in ("SEQ_CLS", "TOKEN_CLS"):  # of decoders `score`; `pre_classifier` is DistilBERT's
            return ("classifier", "pre_classifier", "score")
        return (self.head,) if self.head else ()

    @property
    def by(self) -> str:
        """Return the trainer that runs it, as a value of --trainer; language models have a choice."""
        return {"torch": "torch", "transformers": "transformers", "SentenceTransformer": "transformers"}.get(
            self.trainer, "trl"
        )

    @property
    def target(self) -> str:
        """Return the target of --out whose script runs it."""
        return "diffusers" if self.sample == "noise" else self.by

    @property
    def of_tokens(self) -> bool:
        """Return whether a sample is text, whose length is the sequence length."""
        return self.sample not in ("image", "features", "waveform", "prompt", "noise")

    @property
    def evaluated(self) -> bool:
        """Return whether a traced run evaluates; where answers are sampled that takes what a step takes."""
        return self.sample != "prompt"

    @property
    def resumed(self) -> bool:
        """Return whether a traced run resumes; sentence-transformers reads a checkpoint's files by its own code."""
        return self.sample != "anchor"

    @property
    def heard(self) -> bool:
        """Return whether a sample is a recording."""
        return self.sample in ("features", "waveform")

    @property
    def language(self) -> bool:
        """Return whether a language model learns its own tokens, by any trainer of memfit's table."""
        return self.key in ("sft", "pretrain")


USUAL_SECONDS = 10.0  # of a recording, where neither the model nor the user says


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of one sample, apart from the sequence length. What a task does not have stays unused."""

    images: int = 1  # of a text with images; others have none
    image: tuple[int, int] = (0, 0)  # width and height in pixels; 0: the model's own
    audio_seconds: float = 0.0  # 0: the window of a model that has one, else 10
    cached: bool = False  # latents and text embeddings are made before the training
    text: int = 0  # tokens to which the trainer pads cached text embeddings; 0: as diffusers' scripts do
    target: int = 128  # tokens of what a sequence-to-sequence or speech model writes
    classes: int = 2  # of a classifier
    padded: bool = True  # the texts of a batch have different lengths, so that attention takes a mask
    prompt: int = 512  # tokens of a prompt whose answers are sampled
    completion: int = 512  # tokens of each answer, all of which are sampled
    generations: int = 8  # answers to a prompt
    reference: bool = False  # a reference model is resident, also where the trainer's default has none


PLAIN = Shape()


@dataclass(frozen=True, slots=True)
class Images:
    """The images of one sample, as the model's processor takes them."""

    size: tuple[int, int]  # width and height of each, before they are resized
    tokens: int  # of all of them, with those that frame them
