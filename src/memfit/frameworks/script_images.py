"""What the script of text-to-image training reads: images with their captions."""

from __future__ import annotations

from memfit.data.task_samples import COLUMNS
from memfit.frameworks.script_data import READERS, ROWS, ScriptKind, Setting, layouts
from memfit.frameworks.script_media import read_folder
from memfit.nouns.plan import Plan


def _resolution(plan: Plan) -> list[Setting]:
    return [("RESOLUTION", str(plan.job.shape.image), "width and height; images are scaled and cut to it")]


CAPTIONS = ScriptKind(
    holds="hold an image\n(or its path) and its caption; or a folder of images with a metadata.jsonl",
    data=layouts(*COLUMNS["noise"])
    + 'FILES = ("image",)\n' + READERS + ROWS + read_folder("imagefolder"),
    imports={"PIL": ("ImageOps",), "datasets": ("Image",)},
    encode='''\
def encode(samples: Dataset, tokenizers: list) -> Dataset:
    """Return pixels from -1 to 1, and the token ids of each text encoder, which are made when they are used."""
    image, text = samples.column_names

    def encoded(rows: dict) -> dict:
        captions = [str(value) for value in rows[text]]
        words = {"padding": "max_length", "truncation": True, "return_tensors": "pt"}
        ids = [
            tokenizer(captions, max_length=tokens, **words).input_ids
            for tokenizer, tokens in zip(tokenizers, TOKENS, strict=True)
        ]
        return {"pixels": [pixels(one) for one in rows[image]], "ids": list(zip(*ids, strict=True))}

    return samples.cast_column(image, Image()).with_transform(encoded)


def pixels(picture: object) -> torch.Tensor:
    """Return an image as the VAE takes it."""
    cut = ImageOps.fit(picture.convert("RGB"), RESOLUTION)
    return torch.from_numpy(numpy.asarray(cut, dtype=numpy.float32) / 127.5 - 1).permute(2, 0, 1)


''',
    packages=("pillow",),
    sizes=_resolution,
)  # fmt: skip
