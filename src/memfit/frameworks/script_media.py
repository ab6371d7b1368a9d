"""What the scripts of images and of recordings have of their own."""

from __future__ import annotations

from memfit.frameworks.script_data import LABELS, READ, READERS, ROWS, ScriptKind, Setting, layouts
from memfit.nouns.plan import Plan

_KEEP = ("remove_unused_columns", "False", "the columns of files are read when they are used")
_FOLDER = "    if Path(data).is_dir():\n        return load_dataset("


def _read(builder: str) -> str:
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
    data=layouts(("pixel_values", "label"), ("image", "label"), ("img", "label"), ("image", "labels"))
    + 'FILES = ("image", "img")\n' + READERS + ROWS + _read("imagefolder") + LABELS,
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
    arguments=(_KEEP,),
    packages=("pillow", "torchvision"),
    sizes=_image_size,
)  # fmt: skip
