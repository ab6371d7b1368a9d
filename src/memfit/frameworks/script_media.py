"""What the scripts of images and of recordings have of their own."""

from __future__ import annotations

from memfit.data.task_samples import COLUMNS
from memfit.frameworks.script_data import LABELS, READ, READERS, ROWS, ScriptKind, Setting, layouts
from memfit.frameworks.text import literal
from memfit.frameworks.training_keys import whole
from memfit.nouns.plan import Plan
from memfit.nouns.task import USUAL_SECONDS
from memfit.tables.tasks import WINDOWED

KEEP = ("remove_unused_columns", "False", "the columns of files are read when they are used")
_FOLDER = "    if Path(data).is_dir():\n        return load_dataset("


def read_folder(builder: str) -> str:
    """Return the functions that read data, also of a folder of files."""
    first = "    suffix = Path(data).suffix.lower()\n"
    assert first in READ
    return READ.replace(first, f'{_FOLDER}"{builder}", data_dir=data, split="train")\n{first}')


# ---- images


def _image_size(plan: Plan) -> list[Setting]:
    wide, tall = plan.job.shape.image
    size = f'{{"height": {tall}, "width": {wide}}}' if wide else "None"
    return [("IMAGE_SIZE", size, "pixels" if wide else "the size of the model's own processor")]


IMAGE = ScriptKind(
    holds="hold an image\n(or its path) and a label; or a folder that holds a folder of images for each label",
    data=layouts(*COLUMNS["image"])
    + 'FILES = ("image", "img")\n' + READERS + ROWS + read_folder("imagefolder") + LABELS,
    imports={
        "datasets": ("ClassLabel", "Image", "List"), "torch": (),
        "transformers": ("AutoImageProcessor", "BaseImageProcessor", "default_data_collator"),
    },
    encode='''\
def load_processor(model: str) -> BaseImageProcessor:
    """Return what scales and normalises images for the model."""
    if IMAGE_SIZE is None:
        return AutoImageProcessor.from_pretrained(model)
    return AutoImageProcessor.from_pretrained(model, size=IMAGE_SIZE, do_center_crop=False)


def encode(samples: Dataset, processor: BaseImageProcessor | None, labels: list[str]) -> Dataset:
    """Return pixels as the processor makes them when they are used, and the number of each label."""
    image, label = samples.column_names
    numbers = numbers_of(samples, labels)

    def encoded(rows: dict) -> dict:
        if processor is None:
            pixels = torch.tensor(rows[image], dtype=torch.float)
        else:
            pixels = processor([picture.convert("RGB") for picture in rows[image]], return_tensors="pt").pixel_values
        return {"pixel_values": pixels, "labels": [numbers[value] for value in rows[label]]}

    return (samples.cast_column(image, Image()) if processor else samples).with_transform(encoded)
''',
    prepare="""\
    processor = load_processor(args.model) if "pixel_values" not in samples.column_names else None
    labels = list(names_of(samples).values())
""",
    encoded="encode({}, processor, labels)",
    collator="default_data_collator",
    processor="processor",
    loading="**head(labels)",
    arguments=(KEEP,),
    packages=("pillow", "torchvision"),
    sizes=_image_size,
)  # fmt: skip


# ---- recordings


def _seconds(plan: Plan) -> list[Setting]:
    if plan.job.architecture.model_type in WINDOWED:
        return [("AUDIO_SECONDS", "None", "the extractor pads or cuts recordings to the encoder's window")]
    seconds = plan.job.shape.audio_seconds or USUAL_SECONDS
    return [("AUDIO_SECONDS", literal(whole(seconds)), "longer recordings are left out")]


def _heard(plan: Plan) -> list[Setting]:
    target = "tokens of what is written; longer texts are cut"
    return [*_seconds(plan), ("TARGET_LENGTH", str(plan.job.shape.target), target)]


_FILES = layouts(*COLUMNS["features"]) + 'FILES = ("audio",)\n'
_SOUND = _FILES + READERS + ROWS + read_folder("audiofolder")
# a recording that is already an array needs no decoder
_ARRAYS = '''\
def recordings(samples: Dataset, rate: int) -> Dataset:
    """Return the samples with arrays of so many numbers a second, no longer than AUDIO_SECONDS.

    What is no array is decoded when it is used.
    """
    audio = samples.column_names[0]
    decoded = isinstance(samples.features[audio], dict)
    sounds = samples if decoded else samples.cast_column(audio, Audio(sampling_rate=rate))
    if AUDIO_SECONDS is None:
        return sounds
    return sounds.filter(lambda sound: len(sound["array"]) <= AUDIO_SECONDS * rate, input_columns=[audio])


'''
_TALKED = "hold a recording\n(or its path) and its text; or a folder of recordings with a metadata.csv"
_PACKAGES = ("torchcodec",)

FEATURES = ScriptKind(
    holds=_TALKED,
    data=_SOUND + _ARRAYS,
    imports={
        "collections.abc": ("Callable",),
        "datasets": ("Audio",),
        "torch": (),
        "transformers": ("AutoProcessor", "ProcessorMixin"),
    },
    encode='''\
def encode(samples: Dataset, processor: ProcessorMixin) -> Dataset:
    """Return arrays of sound, and token ids of their texts."""
    audio, text = samples.column_names

    def encoded(rows: dict) -> dict:
        sounds = [sound["array"] for sound in rows[audio]]
        return {"sound": sounds, "labels": processor.tokenizer([str(value) for value in rows[text]]).input_ids}

    return recordings(samples, processor.feature_extractor.sampling_rate).with_transform(encoded)


def collator(processor: ProcessorMixin) -> Callable[[list[dict]], dict]:
    """Return a function that makes what the encoder takes, and pads it and the labels to the longest of the batch."""
    extractor = processor.feature_extractor
    padding = "max_length" if AUDIO_SECONDS is None else "longest"
    start = (getattr(processor.tokenizer, "prefix_tokens", None) or [None])[0]  # which the decoder adds itself

    def collate(rows: list[dict]) -> dict:
        sounds = [row["sound"] for row in rows]
        heard = extractor(sounds, sampling_rate=extractor.sampling_rate, padding=padding, return_tensors="pt")
        texts = [row["labels"][row["labels"][0] == start :][:TARGET_LENGTH] for row in rows]
        longest = max(map(len, texts))
        labels = torch.tensor([text + [-100] * (longest - len(text)) for text in texts])
        return {**heard, "labels": labels}

    return collate
''',
    prepare="""\
    processor = AutoProcessor.from_pretrained(args.model)  # for one language: language="german", task="transcribe"
""",
    encoded="encode({}, processor)",
    collator="collator(processor)",
    processor="processor",
    arguments=(KEEP,),
    packages=_PACKAGES,
    sizes=_heard,
)

WAVEFORM = ScriptKind(
    holds=_TALKED,
    data=_SOUND + _ARRAYS,
    imports={
        "collections.abc": ("Callable",), "datasets": ("Audio",), "torch": (),
        "transformers": ("AutoFeatureExtractor", "AutoTokenizer", "Wav2Vec2CTCTokenizer", "Wav2Vec2Processor"),
    },
    encode='''\
def load_processor(model: str, samples: Dataset, output: str) -> Wav2Vec2Processor:
    """Return the model's feature extractor and tokenizer; a model without one gets the characters of the data."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(model)
    except (OSError, TypeError, ValueError):
        texts = (str(row[samples.column_names[1]]) for row in samples.select_columns(samples.column_names[1]))
        characters = sorted({letter for text in texts for letter in text.replace(" ", "|")} | {"|"})
        Path(output).mkdir(parents=True, exist_ok=True)
        vocabulary = {name: number for number, name in enumerate(["[PAD]", "[UNK]", *characters])}
        (Path(output) / "vocab.json").write_text(json.dumps(vocabulary))
        tokenizer = Wav2Vec2CTCTokenizer(f"{output}/vocab.json", unk_token="[UNK]", pad_token="[PAD]")
    return Wav2Vec2Processor(feature_extractor=AutoFeatureExtractor.from_pretrained(model), tokenizer=tokenizer)


def encode(samples: Dataset, processor: Wav2Vec2Processor) -> Dataset:
    """Return arrays of sound no longer than AUDIO_SECONDS, and the characters of their texts."""
    audio, text = samples.column_names
    rate = processor.feature_extractor.sampling_rate
    letters = processor.tokenizer.get_vocab()
    cased = str.upper if "A" in letters and "a" not in letters else str.lower if "A" not in letters else str

    def encoded(rows: dict) -> dict:
        texts = [cased(str(value)) for value in rows[text]]
        return {"sound": [sound["array"] for sound in rows[audio]], "labels": processor.tokenizer(texts).input_ids}

    return recordings(samples, rate).with_transform(encoded)


def collator(processor: Wav2Vec2Processor) -> Callable[[list[dict]], dict]:
    """Return a function that pads waveforms and labels to the longest of the batch."""
    extractor = processor.feature_extractor

    def collate(rows: list[dict]) -> dict:
        sounds = [row["sound"] for row in rows]
        heard = extractor(sounds, sampling_rate=extractor.sampling_rate, padding=True, return_tensors="pt")
        longest = max(len(row["labels"]) for row in rows)
        labels = torch.tensor([row["labels"] + [-100] * (longest - len(row["labels"])) for row in rows])
        return {**heard, "labels": labels}

    return collate


def head(processor: Wav2Vec2Processor) -> dict:
    """Return the words of from_pretrained that make a new head for the characters."""
    return {
        "vocab_size": len(processor.tokenizer),
        "pad_token_id": processor.tokenizer.pad_token_id,
        "ctc_loss_reduction": "mean",
        "mask_time_prob": 0.0,  # a batch is too short to mask spans of time
        "ignore_mismatched_sizes": True,
    }
''',
    prepare="    processor = load_processor(args.model, samples, args.output)\n",
    encoded="encode({}, processor)",
    collator="collator(processor)",
    processor="processor",
    loading="**head(processor)",
    arguments=(KEEP,),
    packages=_PACKAGES,
    sizes=_seconds,
)  # fmt: skip
