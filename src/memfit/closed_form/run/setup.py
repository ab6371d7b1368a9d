"""Turn architecture, recipe and card into the styles under which blocks, embedding and head are traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from memfit.closed_form.layers.block import per_layer_of
from memfit.closed_form.layers.elementwise import ROTARY
from memfit.closed_form.layers.embedding import EmbeddingStyle, MaskStyle, embedding_program
from memfit.closed_form.layers.encoder_decoder import SOURCE
from memfit.closed_form.layers.head import SHIFTING, HeadStyle, head_program, source_program
from memfit.closed_form.layers.program import GRADIENT, INPUT, TIED, Program, block_program
from memfit.closed_form.layers.speech import RecordingStyle, recording_program
from memfit.closed_form.layers.tower import TowerStyle, join_program, merger_program, pictures_program, stem_program
from memfit.closed_form.numerics import Numerics, adapted, attention_kernel, has_adapter, kernel_width, saved_ends
from memfit.closed_form.run.micro_step import MicroStep, PlacedProgram, columns, micro_step, placed_blocks
from memfit.closed_form.style import CODES, Mask, Style
from memfit.closed_form.task_runs import drops, run_of
from memfit.nouns.architecture import Architecture, Attention, Layer, Norm, Tower, Weight
from memfit.nouns.job import Recipe
from memfit.tables.cuda_kernels import Capability
from memfit.tables.liger_kernels import LIGER
from memfit.tables.precisions import BYTES, meaning
from memfit.tables.tasks import TASKS
from memfit.tables.trainers import Trainer, holds_unit_inputs


@dataclass(frozen=True, slots=True)
class Situation:
    """Facts about the data and the training loop that a recipe does not hold."""

    padded: bool = False  # sequences differ in length, or one row holds several
    train: bool = True
    accumulating: bool = False
    use_cache: bool = False
    release_gradients: bool = False  # they are sharded, offloaded or consumed as soon as they exist
    shards: int = 0  # see Style.shards
    mask_given: bool = True  # batches carry an attention mask, even one that masks nothing; packed rows have none
    reference: bool = False  # the adapters are off


def common_style(a: Architecture, r: Recipe, n: Numerics, t: Trainer, capability: Capability | None,
                 s: Situation) -> Style:  # fmt: skip
    """Return what the styles of all layers share."""
    full, own = r.method == "full", per_layer_of(a)
    plain, (hidden, attention) = full or s.reference, drops(a)
    residual = 4 if n.autocast and _embedding_norm(a) else n.residual  # autocast runs an embedding's LayerNorm in fp32
    liger = LIGER.get(a.model_type) if t.liger_layers and r.loss == "fused" else None
    return Style(
        weight=n.weight, norm_weight=n.other, autocast=n.autocast, computed=BYTES[meaning(r).computed],
        residual=residual, additive=n.residual,
        trained=full,
        quantization=r.quantization if r.method == "qlora" else "none",
        lora_rank=0 if plain else r.lora_rank, lora_targets=frozenset() if plain else adapted(a, r.lora_targets),
        lora_dropout=r.lora_dropout > 0 and run_of(a).dropout, adapter=n.adapter, magnitude=n.magnitude,
        checkpointing=r.checkpointing if s.train else "none", dropout=s.train and hidden,
        attention_dropout=s.train and attention, grad=s.train,
        accumulating=s.accumulating, release_gradients=s.release_gradients, use_cache=s.use_cache,
        shards=s.shards, shard_gradient=BYTES[meaning(r).stored] if full else 4,
        unit=max(x.parameters for x in a.kinds) * n.weight if s.shards else 0,
        reentrant=t.reentrant and s.train and r.checkpointing == "full", repeats_keys=r.attention in t.repeats_keys,
        holds_output=t.holds_logits, grouped_product=capability is None or capability >= (8, 0),
        liger=liger, code=CODES[t.code], per_layer=own.joint if own else 0,
        own_input_grad=s.train and (full or r.checkpointing != "none"),
        batched=r.micro_batch > 1 and a.layers[0].attention.position_bias,
        half=meaning(r).computed == "fp16", fp16=meaning(r).stored == "fp16",
        exchange="" if r.context_parallel == 1 else "ulysses" if r.zero else "ring", sequence_shards=r.context_parallel,
    )  # fmt: skip


def styles_of(a: Architecture, r: Recipe, n: Numerics, t: Trainer, capability: Capability | None,
              s: Situation) -> tuple[Style, ...]:  # fmt: skip
    """Return one style per layer; equal layers get equal styles, so they share a program."""
    full, common = r.method == "full", common_style(a, r, n, t, capability, s)
    made: dict[int, Style] = {}
    styles = []
    for i, layer in enumerate(a.layers):
        style = made.get(id(layer))
        if style is None:
            mask = _mask(layer.attention, r, s)
            kernel = attention_kernel(
                layer.attention, r, kernel_width(r, n), capability, mask != "none", s.train, drops(a)[1]
            )
            style = made[id(layer)] = replace(common, kernel=kernel, mask=mask)
        if i == 0:
            # a frozen embedding gives the first block an input without gradient, unless checkpointing asks for one
            embedded = not full and s.train and not saved_ends(a, r.modules_to_save)[0]  # by a frozen table
            frozen = embedded and r.checkpointing == "none" and not tower_learns(a, r)
            embedding_alone = len(a.embedding) == 1 and not a.embedding_dropout
            # a variable of BertModel.forward, and of ViTModel's
            variable = a.task == "vision" or (layer.placement == "post" and _in_a_module(a))
            style = replace(style, input_grad=not frozen, holds_input=embedding_alone or variable)
            # a leaf that asks for a gradient, which the graph holds though its copy on the host is enough
            if embedded and r.checkpointing == "offload" and embedding_alone and a.embedding_scale != "model":
                style = replace(style, unit_holds=() if a.vision else (INPUT,))
        styles.append(style)
    if s.train and holds_unit_inputs(r):
        styles = _held_by_units(styles)
    hands = a.layers[0].attention.returns_weights and (not s.train or r.checkpointing != "none")
    return tuple(_widened(a, _handing(styles) if hands else styles))


def _handing(styles: list[Style]) -> list[Style]:
    """Return the styles of blocks that hand on their attention's weights, of which a stack's ends do one half."""
    made = {id(style): replace(style, hands_weights=True) for style in styles}
    styles = [made[id(style)] for style in styles]
    styles[0] = replace(styles[0], first=True)
    styles[-1] = replace(styles[-1], last=True)
    return styles


def _widened(a: Architecture, styles: list[Style]) -> list[Style]:
    """Return the styles where a block may return wider hidden states than it gets: from it on all are in fp32.

    Autocast runs a LayerNorm in fp32, and bitsandbytes' layers return the dtype of their input.
    """
    if not styles[0].autocast or styles[0].residual == 4:
        return styles
    made: dict[int, Style] = {}
    for i, (layer, style) in enumerate(zip(a.layers, styles, strict=True)):
        program = block_program(layer, style, a.width)
        if program.sizes[program.output]["T"] > a.width * style.residual:
            wide = [made.setdefault(id(later), replace(later, residual=4)) for later in styles[i + 1 :]]
            return [*styles[:i], replace(style, widens=True), *wide]
    return styles


def _held_by_units(styles: list[Style]) -> list[Style]:
    """Return the styles under FSDP1's hook; the last block's incoming gradient is no unit's input gradient."""
    made: dict[tuple[int, bool, bool], Style] = {}
    for i, style in enumerate(styles):
        key = id(style), i == 0, i + 1 == len(styles)
        holds = (INPUT,) if i + 1 == len(styles) else (INPUT, GRADIENT)
        styles[i] = made.setdefault(key, replace(style, unit_holds=holds, prefetches=i > 0))
    return styles


def _embedding_norm(a: Architecture) -> Norm | None:
    """Return the norm right after the embedding, if there is one."""
    return Norm("layer") if any(w.kind == "norm" and "per_layer" not in w.name for w in a.embedding) else None


def _in_a_module(a: Architecture) -> bool:
    """Return whether all embeddings are one module, as in BERT."""
    return any("embeddings." in w.name for w in a.embedding)


def _written_out(a: Attention, r: Recipe) -> bool:
    return r.attention == "eager" or not a.sdpa


def _package(a: Attention, r: Recipe) -> bool:
    """Return whether the flash-attn package runs, which takes lengths and windows but no [B, 1, S, S] mask."""
    return r.attention == "flash" and a.sdpa and a.code != "falcon"


def windowed(a: Attention, sequence: int) -> bool:
    """Return whether a layer needs a mask for its sliding window; transformers makes it at equal length too.

    GPT-Neo's layers narrow the one mask themselves.
    """
    return a.window is not None and a.window <= sequence and a.code != "gptj"


def _mask(a: Attention, r: Recipe, s: Situation) -> Mask:
    """Return the mask that the attention of a layer gets."""
    if _package(a, r):
        return "rows" if s.padded else "none"
    always = windowed(a, r.sequence_length) or a.code == "falcon" or (a.causal and _written_out(a, r))
    if s.padded or always:
        return "rows" if s.padded or s.mask_given else "shared"
    return "none"


def _masks(a: Architecture, r: Recipe, n: Numerics, s: Situation) -> MaskStyle:
    """Return the style of the masks, which the model makes once per forward."""
    kinds = {windowed(layer.attention, r.sequence_length) for layer in a.layers if layer.attention.kind != "linear"}
    first = a.layers[0].attention
    return MaskStyle(
        windows=() if _package(first, r) else tuple(sorted(kinds)), always=first.code == "falcon", itemsize=n.residual,
        saved=first.code == "falcon" and first.alibi and not _written_out(first, r) and n.autocast in (0, n.residual),
        alibi=first.heads if first.alibi else 0, given=s.mask_given, padded=s.padded, causal=first.causal,
        additive=n.residual if any(_written_out(layer.attention, r) for layer in a.layers) else 0,
    )  # fmt: skip


def _tables(a: Architecture) -> dict[str, Weight]:
    """Return the embedding tables of tokens, positions and types by kind, without those that are fixed."""
    found: dict[str, Weight] = {}
    for w in a.embedding:
        if w.kind == "embedding" and not w.fixed:
            kind = "positions" if "position" in w.name or "wpe" in w.name else "types" if "type" in w.name else "tokens"
            found.setdefault(kind, w)
    return found


def ends_of(a: Architecture, r: Recipe, n: Numerics, t: Trainer, s: Situation) -> tuple[EmbeddingStyle, HeadStyle]:
    """Return the styles of embedding and head."""
    full, tables = r.method == "full", _tables(a)
    first, last = (full or bool(part) for part in saved_ends(a, () if full else r.modules_to_save))
    widths = [n.saved if saved and not full else n.other for saved in (first, last)]
    loss = "next token" if s.use_cache and run_of(a).sampled else run_of(a).head or t.head(r.loss)
    rows, narrow = {kind: w.shape[0] for kind, w in tables.items()}, tables["tokens"].shape[1]
    rotary = max(layer.attention.rotary_dim for layer in a.layers)
    embedding = EmbeddingStyle(
        vocabulary=rows["tokens"], width=narrow, projected=a.width if narrow != a.width else 0,
        rotary=(rotary,) * a.rotary_tables if rotary else (),
        wide_tables=ROTARY[a.layers[0].attention.rotary].wide_table,
        tied=a.tied and full,
        reduced_with=sum(w.numel for w in (*a.final, *a.head)) if full and t.ends_in_root and not a.tied else 0,
        tied_in_place=loss != "full" or (n.autocast not in (0, n.other)),
        positions=rows.get("positions", 0), types=rows.get("types", 0), scaled=a.embedding_scale,
        norm=_embedding_norm(a), dropout=a.embedding_dropout,
        module=_in_a_module(a), checkpointed=r.checkpointing != "none" and s.train,
        leaf=not first and r.checkpointing != "none" and s.train,
        per_layer=per_layer_of(a), masks=_masks(a, r, n, s), trained=first, itemsize=widths[0],
    )  # fmt: skip
    masked, classes = a.task == "masked-lm", _classes(a)
    each = a.trained_for == "token-classification" and any(w.name == "head.dense.weight" for w in a.head)  # ModernBERT
    outputs = classes or rows["tokens"]
    head = HeadStyle(
        vocabulary=outputs, width=a.width, projected=narrow if narrow != a.width else 0, norm=a.final_norm,
        loss="classes" if classes else loss,
        pooled=any(
            "pooler" in w.name or "pre_classifier" in w.name or w.name == "classifier.dense.weight" for w in a.head
        ),
        tied=a.tied and (full or not last), reduced_later=a.tied or t.ends_in_root, trained=last,
        new=bool(TASKS[a.trained_for].new_modules), itemsize=widths[1], holds_logits=t.holds_logits,
        softcap=a.logits_softcap, transform="gelu" if masked or each else "",
        bias=any(w.name.endswith("bias") and w.shape == (outputs,) for w in a.head), causal=not masked,
        upcast=a.logits_upcast,
        batched=r.micro_batch > run_of(a).rows and loss in (*SHIFTING, "odds"),
        returns_fp32=t.logits_to_fp32 and n.autocast > 0 and masked,
    )  # fmt: skip
    own = CODES[t.code].head
    return embedding, own(head, a, r, s.train) if own else head


def _classes(a: Architecture) -> int:
    """Return the number of classes of a classifier; 0 for a head that predicts tokens."""
    if a.task not in ("classification", "vision"):
        return 0
    return next((w.shape[0] for w in reversed(a.head) if len(w.shape) == 2), 0)


def tower_learns(a: Architecture, r: Recipe) -> bool:
    """Return whether anything in a tower, or before it, gets a gradient."""
    if a.vision is None or a.task == "vision":
        return False
    names = adapted(a, r.lora_targets)
    return r.method == "full" or r.checkpointing != "none" or any(has_adapter(w, names) for w in a.tower)


def images_of(
    a: Architecture, r: Recipe, n: Numerics, capability: Capability | None, embedding: EmbeddingStyle, common: Style
) -> tuple[PlacedProgram, ...]:
    """Return the traced programs of a tower and of what joins its tokens to the text; none without images."""
    if (tower := a.vision) is None or a.task == "vision":
        return ()
    full, train, learns = r.method == "full", common.grad, tower_learns(a, r)
    residual = n.autocast or n.other
    plain = replace(
        common, residual=residual, mask="none", images=tower.rows, windows=tower.windows, holds_input=False,
        input_grad=train and learns,
    )  # fmt: skip
    # autocast runs a LayerNorm in fp32, and bitsandbytes' layers return the dtype of their input
    widens = bool(n.autocast) and r.method == "qlora" and tower.merger.norm.kind == "layer"
    styles: list[Style] = []
    made: dict[tuple[int, bool], Style] = {}
    for i, layer in enumerate(tower.layers):
        learns_in = plain.input_grad and not (i == 0 and not full and r.checkpointing == "none")
        key = id(layer), i == 0 and (widens or not learns_in)
        if key not in made:
            kernel = attention_kernel(layer.attention, r, kernel_width(r, n), capability, False, train)
            wide = 4 if widens and i else residual
            made[key] = replace(plain, kernel=kernel, residual=wide, input_grad=learns_in, widens=widens and not i)
        styles.append(made[key])
    ends = TowerStyle(
        tower=tower, dtype=meaning(r).computed if n.autocast else meaning(r).stored, weight=n.other,
        trained=full, leaf=embedding.leaf, learns=train and learns, text=embedding.itemsize,
    )  # fmt: skip
    once, text = (replace(style, checkpointing="none") for style in (plain, common))
    return (
        PlacedProgram(stem_program(ends, once), "the patches"),
        *placed_blocks(tower.layers, styles, tower.width, "tower "),
        PlacedProgram(merger_program(ends, replace(styles[-1], checkpointing="none")), "the tower's merger"),
        PlacedProgram(join_program(ends, embedding, text), "the images"),
    )


def _of_pictures(
    a: Architecture, tower: Tower, r: Recipe, n: Numerics, s: Situation, styles: tuple[Style, ...]
) -> MicroStep:
    """Return the traced micro-step of a classifier of images."""
    full = r.method == "full"
    first, last = (replace(style, checkpointing="none", input_grad=True) for style in (styles[0], styles[-1]))
    head = HeadStyle(
        vocabulary=_classes(a), width=a.width, norm=a.final_norm, loss="classes", first=True, trained=full,
        new=bool(TASKS[a.trained_for].new_modules), itemsize=n.other, bias=True, causal=False,
    )  # fmt: skip
    ends = TowerStyle(
        tower=tower, dtype=meaning(r).computed if n.autocast else meaning(r).stored, weight=n.other, trained=full,
        leaf=not full and r.checkpointing != "none" and s.train,
    )  # fmt: skip
    below = PlacedProgram(pictures_program(ends, first, a.embedding_dropout), "embedding")
    above = PlacedProgram(head_program(head, last), "head")
    return MicroStep(below, placed_blocks(a.layers, styles, a.width), above)


def micro_step_of(a: Architecture, r: Recipe, n: Numerics, t: Trainer, capability: Capability | None,
                  s: Situation) -> MicroStep:  # fmt: skip
    """Return the traced micro-step of a recipe."""
    if a.encoder_layers:
        return pair_of(a, r, n, t, capability, s)
    styles = styles_of(a, r, n, t, capability, s)
    if a.task == "vision" and a.vision:
        return _of_pictures(a, a.vision, r, n, s, styles)
    embedding, head = ends_of(a, r, n, t, s)
    if run_of(a).columns > 1:
        return columns(a, styles, embedding, head)
    made = micro_step(a, styles, replace(embedding, alone=a.vision is not None), head)
    made = replace(made, images=images_of(a, r, n, capability, embedding, styles[-1]))
    if not (s.train and run_of(a).reference):
        return made
    frozen = replace(s, train=False, reference=True, accumulating=False)
    return replace(made, reference=micro_step_of(a, r, n, t, capability, frozen))


# ---- encoder-decoder models ----------------------------------------------------------------------------------------


def pair_of(a: Architecture, r: Recipe, n: Numerics, t: Trainer, capability: Capability | None,
            s: Situation) -> MicroStep:  # fmt: skip
    """Return the traced micro-step of an encoder and its decoder, which shares one table with the head."""
    common, full = replace(common_style(a, r, n, t, capability, s), input_grad=True), r.method == "full"
    layers = a.layers[: a.encoder_layers], a.layers[a.encoder_layers :]
    checkpointed = r.checkpointing != "none" and s.train
    stack = partial(_stack, a=a, r=r, n=n, capability=capability, s=s)
    # transformers makes the embedded tokens require a gradient where blocks are checkpointed, but no recording
    styles = stack(
        layers[0], replace(common, use_cache=False, turned=a.recording is not None),
        frozen=not full and not (checkpointed and not a.recording),
    )  # fmt: skip
    ended, width = source_program(
        replace(styles[-1], checkpointing="none"), a.final_norm or Norm("rms"), a.width, a.head_dropout
    )
    handed = replace(
        common, decodes=True, source=width, source_grad=s.train, source_mask=s.padded,
    )  # fmt: skip
    written = stack(layers[1], handed, frozen=not full and not checkpointed)
    blocks = placed_blocks(layers[1], written, a.width)
    head = replace(_head_of_pair(a, n, t, full, width), frees_source=SOURCE in blocks[0].program.hands)
    above = head_program(head, replace(written[-1], checkpointing="none"))
    tables = _tables(a)
    tokens = EmbeddingStyle(
        vocabulary=a.vocabulary, width=a.width, tied=a.tied and full, awaited=TIED in above.hands,
        dropout=a.embedding_dropout, checkpointed=checkpointed, leaf=not full and checkpointed, trained=full,
        itemsize=n.other, masks=MaskStyle(padded=s.padded, causal=False, saved=full, itemsize=n.residual),
    )  # fmt: skip
    first, begins = (replace(stack[0], checkpointing="none") for stack in (styles, written))
    read = _recorded(a, r, n, first) or embedding_program(replace(tokens, tied_in_place=True), first)
    begun = embedding_program(
        replace(tokens, handed_on=not a.recording, tied_in_place=n.autocast not in (0, n.other), source_mask=s.padded,
                positions=tables["positions"].shape[0] if "positions" in tables else 0, positions_by_sample=True,
                masks=MaskStyle(windows=())),
        begins,
    )  # fmt: skip
    encoder = (
        PlacedProgram(read, "encoder embedding"), *placed_blocks(layers[0], styles, a.width, "encoder "),
        PlacedProgram(ended, "end of the encoder"),
    )  # fmt: skip
    return MicroStep(PlacedProgram(begun, "embedding"), blocks, PlacedProgram(above, "head"), encoder=encoder)


def _stack(layers: Sequence[Layer], common: Style, a: Architecture, r: Recipe, n: Numerics,
           capability: Capability | None, s: Situation, *, frozen: bool) -> list[Style]:  # fmt: skip
    """Return the styles of the blocks of an encoder or a decoder; only its ends differ.

    frozen: what enters the first block requires no gradient.
    """
    attention = layers[0].attention
    masked = s.padded and not attention.causal
    kernel = attention_kernel(attention, r, kernel_width(r, n), capability, masked, s.train)
    style = replace(common, kernel=kernel, mask="rows" if masked else "none")
    styles = [style] * len(layers)
    # without dropout the first block's input is the embedding's output, a variable of T5's stack
    held = not a.recording and not (common.dropout and a.embedding_dropout)
    shares = layers[0].cross is not None or attention.position_bias  # else the first and last block are as all others
    styles[0] = replace(style, first=shares, input_grad=not frozen, holds_input=held)
    styles[-1] = replace(styles[-1], last=shares)
    return styles


def _recorded(a: Architecture, r: Recipe, n: Numerics, style: Style) -> Program | None:
    """Return what precedes the blocks of an encoder of sound; None for one of tokens."""
    if a.recording is None:
        return None
    return recording_program(
        RecordingStyle(
            recording=a.recording, width=a.width, dtype=meaning(r).computed if n.autocast else meaning(r).stored,
            weight=n.other, trained=r.method == "full", dropout=a.embedding_dropout,
        ), style,
    )  # fmt: skip


def _head_of_pair(a: Architecture, n: Numerics, t: Trainer, full: bool, source: int) -> HeadStyle:
    return HeadStyle(
        vocabulary=a.vocabulary, width=a.width, norm=a.final_norm, tied=a.tied, trained=full, itemsize=n.other,
        dropout=a.head_dropout, scaled_states=a.states_scaled, upcast=a.logits_upcast, causal=False,
        returns_fp32=t.logits_to_fp32 and n.autocast > 0, source=source, holds_logits=t.holds_logits,
    )  # fmt: skip
