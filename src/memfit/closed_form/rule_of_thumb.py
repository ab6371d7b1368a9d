"""The rules of thumb of articles, in exact bytes: what a number of parameters costs before any activation."""

from __future__ import annotations

from memfit.closed_form.layers.program import block_program
from memfit.closed_form.numerics import numerics
from memfit.closed_form.size import Dims
from memfit.closed_form.style import Style
from memfit.nouns.architecture import Architecture, Weight
from memfit.nouns.footprint import Line
from memfit.nouns.job import Recipe
from memfit.tables.optimizers import optimizer
from memfit.tables.quantization import QUANTIZATIONS
from memfit.tables.trainers import trainer


def static_lines(
    parameters: int, recipe: Recipe, adapter_parameters: int = 0, adapter_width: int | None = None
) -> tuple[Line, ...]:
    """Return the weights, gradients and optimizer states of `parameters` weights under a recipe, line by line.

    With LoRA and QLoRA only `adapter_parameters` are trained, in `adapter_width` bytes each (default: the trainer's).
    Payload and block scales of quantised weights and states are separate lines: articles quote the payload alone.
    """
    n = numerics(recipe, trainer(recipe.trainer))
    full = recipe.method == "full"
    trained = parameters if full else adapter_parameters
    width = n.weight if full else (adapter_width or n.adapter)
    if recipe.method == "qlora":
        row = QUANTIZATIONS[recipe.quantization]
        lines = [
            Line("parameters", "base weights", row.payload(parameters), f"{parameters:,} x {row.bits} bit"),
            Line("parameters", "block scales", row.scales(parameters, 0), "one scale per block of weights"),
        ]
    else:
        lines = [Line("parameters", "base weights", parameters * n.weight, f"{parameters:,} x {n.weight} B")]
    if not full:
        lines.append(Line("parameters", "adapter weights", trained * width, f"{trained:,} x {width} B"))
    lines.append(Line("gradients", "gradients", trained * width, f"{trained:,} x {width} B, one per trained weight"))
    if full and n.master:
        lines.append(Line("parameters", "fp32 master weights", trained * n.master, f"{trained:,} x {n.master} B"))
    lines += _states(recipe.optimizer, trained, 4 if full and n.master else width)
    return tuple(line for line in lines if line.bytes)


def _states(key: str, trained: int, width: int) -> list[Line]:
    """Return the lines of the states of `trained` weights in one tensor of `width` bytes per element."""
    row = optimizer(key)
    tensors = row.state_tensors(Weight("all", (trained,), "linear"), width) if trained else ()
    if row.block and trained >= row.smallest:
        payload = sum(tensors[::2])
        text = f"{trained:,} x {row.moments} states x {row.width:g} B"
        return [
            Line("optimizer_states", "optimizer states", payload, text),
            Line("optimizer_states", "scales of the states", sum(tensors) - payload, f"4 B per {row.block} states"),
        ]
    each = width if row.width is None else row.width
    return [
        Line("optimizer_states", "optimizer states", sum(tensors), f"{trained:,} x {row.moments} states x {each:g} B")
    ]


def checkpointed_activations(architecture: Architecture, batch: int, sequence: int, itemsize: int = 2) -> int:
    """Return the bytes that activation checkpointing keeps: the input of every block, and nothing else."""
    style = Style(checkpointing="full", weight=itemsize, residual=itemsize)
    dims, total = Dims(batch, sequence), 0
    for layer in architecture.layers:
        program = block_program(layer, style, architecture.width)
        total += dims.bytes({k: v for k, v in program.forward.left.items() if k == "T"})
    return total


def attention_scores(architecture: Architecture, batch: int, sequence: int, itemsize: int = 2) -> int:
    """Return the bytes of one layer's score matrix [B, N, S, S], made by eager attention and no fused kernel."""
    style = Style(kernel="eager", weight=itemsize, residual=itemsize)
    program = block_program(architecture.layers[0], style, architecture.width)
    scores = next(id for id, label in program.labels.items() if label.endswith(".scores"))
    return Dims(batch, sequence).bytes(program.sizes[scores])
