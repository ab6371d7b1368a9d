"""What can be trained: one row a task, with the model classes it applies to and the trainer that runs it."""

from __future__ import annotations

from memfit.errors import BadInput, UnknownName, Unsupported
from memfit.nouns.architecture import Architecture
from memfit.nouns.task import Task

_CAUSAL, _CAUSAL_MODELS = "AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"

_SAMPLED = "transformers samples every answer to its full length; no engine shares the card"

TASKS: dict[str, Task] = {row.key: row for row in (
    Task(key="sft", title="supervised fine-tuning", trainer="SFT", sample="text", unit="sequences", peft="CAUSAL_LM",
         auto=_CAUSAL, mapping=_CAUSAL_MODELS),
    Task(key="pretrain", title="pretraining", trainer="transformers", sample="text", unit="sequences",
         auto=_CAUSAL, mapping=_CAUSAL_MODELS),
    Task(key="image-text", title="supervised fine-tuning with images", trainer="SFT", sample="pictures",
         unit="sequences", peft="CAUSAL_LM", auto="AutoModelForImageTextToText",
         mapping="MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
         caveat="the vision tower is trained, or gets adapters, with the rest"),
    Task(key="masked-lm", title="masked language modelling", auto="AutoModelForMaskedLM",
         mapping="MODEL_FOR_MASKED_LM_MAPPING_NAMES", trainer="transformers", sample="text", unit="sequences"),
    Task(key="classification", title="text classification", auto="AutoModelForSequenceClassification",
         mapping="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", trainer="transformers", sample="label",
         unit="texts", peft="SEQ_CLS"),
    Task(key="token-classification", title="token classification", auto="AutoModelForTokenClassification",
         mapping="MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES", trainer="transformers", sample="token-labels",
         unit="texts", peft="TOKEN_CLS"),
    Task(key="seq2seq", title="sequence-to-sequence training", auto="AutoModelForSeq2SeqLM",
         mapping="MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", trainer="transformers", sample="text-to-text",
         unit="pairs of texts", peft="SEQ_2_SEQ_LM"),
    Task(key="speech", title="speech recognition", auto="AutoModelForSpeechSeq2Seq",
         mapping="MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", trainer="transformers", sample="features",
         unit="recordings"),
    Task(key="speech-ctc", title="speech recognition with CTC", auto="AutoModelForCTC",
         mapping="MODEL_FOR_CTC_MAPPING_NAMES", trainer="transformers", sample="waveform", unit="recordings",
         head="lm_head"),
    Task(key="image-classification", title="image classification", auto="AutoModelForImageClassification",
         mapping="MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", trainer="transformers", sample="image",
         unit="images", head="classifier"),
    Task(key="text-to-image", title="text-to-image training", auto="", mapping="", trainer="torch", sample="noise",
         unit="images", caveat="diffusers' loop; adapters on attention; the longest texts that it keeps"),
    Task(key="reward", title="reward modelling", auto="AutoModelForSequenceClassification",
         mapping="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", trainer="Reward", sample="pair", unit="pairs",
         rates=("1e-4", "1e-3"),
         peft="SEQ_CLS", caveat="each pair is two texts of the sequence length"),
    Task(key="dpo", title="direct preference optimisation", trainer="DPO", sample="choice", unit="pairs",
         rates=("1e-6", "1e-5"),
         peft="CAUSAL_LM", beside="the reference model",
         caveat="each pair is a prompt of half the sequence length with two answers of the other half",
         auto=_CAUSAL, mapping=_CAUSAL_MODELS),
    Task(key="kto", title="Kahneman-Tversky optimisation", trainer="KTO", sample="choice", unit="answers",
         rates=("1e-6", "1e-5"),
         peft="CAUSAL_LM", beside="the reference model", least=2,
         caveat="each answer takes half the sequence length, after a prompt of the other half",
         auto=_CAUSAL, mapping=_CAUSAL_MODELS),
    Task(key="embedding", title="sentence embedding", auto="AutoModel",
         mapping="MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", trainer="SentenceTransformer", sample="anchor",
         unit="pairs of texts", peft="FEATURE_EXTRACTION", package="sentence-transformers",
         caveat="each pair is two texts of the sequence length, and all other pairs of the batch are its negatives"),
    Task(key="orpo", title="odds ratio preference optimisation", trainer="ORPO", sample="choice", unit="pairs",
         module="trl.experimental.orpo", rates=("1e-6", "1e-5"), peft="CAUSAL_LM",
         caveat="each pair is a prompt of half the sequence length with two answers of the other half",
         auto=_CAUSAL, mapping=_CAUSAL_MODELS),
    Task(key="grpo", title="group relative policy optimisation", trainer="GRPO", sample="prompt", unit="answers",
         rates=("1e-6", "1e-5"), peft="CAUSAL_LM", caveat=_SAMPLED, auto=_CAUSAL, mapping=_CAUSAL_MODELS),
    Task(key="rloo", title="reinforce leave-one-out", trainer="RLOO", sample="prompt", unit="answers",
         rates=("1e-6", "1e-5"), peft="CAUSAL_LM", beside="the reference model", caveat=_SAMPLED,
         auto=_CAUSAL, mapping=_CAUSAL_MODELS),
)}  # fmt: skip

# the task a model is usually trained for, by the task its architecture was made for, and by its family
_USUAL: dict[str, str] = {
    "causal-lm": "sft", "multimodal": "image-text", "masked-lm": "masked-lm", "seq2seq-lm": "seq2seq",
    "vision": "image-classification", "classification": "classification", "diffusion": "text-to-image",
    "token-classification": "token-classification", "speech": "speech", "ctc": "speech-ctc", "encoder": "masked-lm",
}  # fmt: skip
_BY_FAMILY: dict[str, str] = {
    **dict.fromkeys(("whisper", "speech_to_text", "speech-encoder-decoder", "moonshine", "moonshine_streaming",
                     "canary", "cohere_asr"), "speech"),
    **dict.fromkeys(("wav2vec2", "wav2vec2-conformer", "wav2vec2-bert", "data2vec-audio", "hubert", "wavlm",
                     "unispeech", "unispeech-sat", "sew", "sew-d"), "speech-ctc"),
}  # fmt: skip
WINDOWED = ("whisper",)  # families whose extractor pads or cuts every recording to the encoder's window


def task(key: str) -> Task:
    """Return a row. Raises UnknownName."""
    if key not in TASKS:
        raise UnknownName("task", key, list(TASKS), hint=f"choose one of {', '.join(TASKS)}")
    return TASKS[key]


def usual(architecture: Architecture) -> Task:
    """Return the task that a model is planned for where none is named."""
    return TASKS[_BY_FAMILY.get(architecture.model_type) or _USUAL[architecture.task]]


def check_formula(key: str, file: str) -> None:
    """Refuse a recipe.toml of another task than a language model's own. Raises Unsupported."""
    if not task(key).language:
        hint = (
            f"memfit estimate --from {file} or memfit trace --from {file} judges it; memfit plan --from {file} plans it"
        )
        problem = f"this command counts language models alone, and the task of {file} is {task(key).title}"
        raise Unsupported(problem, hint=hint)


def refuse(wanted: Task, model: str, possible: list[str]) -> BadInput:
    """Return the error for a task that a model cannot do, with those it can."""
    hint = f"--task {possible[0]}" if len(possible) == 1 else f"it can do {', '.join(possible)}"
    return BadInput(f"{model} cannot be trained for {wanted.title}", hint=hint if possible else "see: memfit models")
