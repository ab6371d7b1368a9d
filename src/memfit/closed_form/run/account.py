"""The byte account of one recipe on one card: the worst instants of every phase, in requested bytes line by line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, NamedTuple

from memfit.closed_form.numerics import (
    Numerics,
    adapted,
    attention_kernel,
    has_adapter,
    kernel_width,
    numerics,
    within_passes,
)
from memfit.closed_form.parallel.sharding import buckets, share_of, whole_at_load
from memfit.closed_form.parallel.share import Share, part
from memfit.closed_form.run.generation import Generation, generation_of
from memfit.closed_form.run.merges import Merge, merge_of
from memfit.closed_form.run.micro_step import MicroStep, Peak, SizeMeter, Stretch, fold, meter_of, peak_within
from memfit.closed_form.run.setup import Situation, micro_step_of
from memfit.closed_form.size import Dims
from memfit.closed_form.static import Static, static_of, trained_weights, with_rotary_caches
from memfit.closed_form.style import CODES
from memfit.closed_form.task_runs import TaskRun, counted, learned_share, run_of
from memfit.errors import SOME_CARD, TRACE_HINT, BadInput, Unsupported
from memfit.nouns.architecture import LANGUAGE, Architecture
from memfit.nouns.footprint import PAGED_IN
from memfit.nouns.gpu import Gpu
from memfit.nouns.job import Recipe
from memfit.nouns.tape import Phase, Role
from memfit.tables.adapters import adapter
from memfit.tables.cuda_kernels import cublas_workspace, threads_per_multiprocessor
from memfit.tables.loading import loading_of
from memfit.tables.optimizers import Optimizer, optimizer
from memfit.tables.precisions import BYTES, meaning
from memfit.tables.quantization import CHECKPOINTS, QUANTIZATIONS
from memfit.tables.trainers import Trainer, checkpointing_of, trainer

AccountLine = tuple[Role, str, int]  # role, label, bytes


@dataclass(frozen=True, slots=True)
class Instant:
    """A moment of a run with its requested bytes: `static` lines and the tensors of a micro-step at `peak`."""

    phase: Phase
    name: str
    requested: int
    static: tuple[AccountLine, ...]
    peak: Peak | None = None
    idle: int = 0  # bytes cached on other streams, which the default stream cannot use

    @staticmethod
    def of(
        phase: Phase, name: str, lines: tuple[AccountLine, ...], moving: int = 0, peak: Peak | None = None,
        idle: int = 0,
    ) -> Instant:  # fmt: skip
        """Return the instant at which these lines and `moving` bytes of a micro-step are alive."""
        return Instant(phase, name, sum(size for _, _, size in lines) + moving, lines, peak, idle)


class PassPart(NamedTuple):
    """A part of a pass in which the lines beside its tensors stay the same.

    `left` are the bytes that the parts before it left, `idle` those cached on other streams.
    """

    phase: Phase
    stretch: Stretch
    lines: tuple[AccountLine, ...]
    where: str  # ", later micro-batch"
    left: int = 0
    idle: int = 0

    def top(self, meter: SizeMeter) -> Instant:
        """Return the worst instant of the part."""
        return self._at(fold(self.stretch, meter))

    def within(self, meter: SizeMeter, step: int) -> Instant:
        """Return the worst instant within a step of the part."""
        return self._at(peak_within(self.stretch, meter, step))

    def _at(self, peak: Peak) -> Instant:
        return Instant.of(self.phase, _named(peak) + self.where, self.lines, self.left + peak.height, peak, self.idle)


class Account:
    """The byte account of one recipe. Cheap to make: everything that does not depend on the batch is cached."""

    def __init__(
        self, architecture: Architecture, recipe: Recipe, gpu: Gpu, padded: bool | None = None,
        profile: Trainer | None = None,
    ) -> None:  # fmt: skip
        if architecture.trainable_memory:
            raise Unsupported(f"{architecture.name}: {architecture.trainable_memory}", hint=TRACE_HINT)
        if not counted(recipe):
            raise Unsupported(
                f"no formula counts {adapter(recipe.adapter).title}",
                hint=f"memfit plan {architecture.name} {SOME_CARD} --adapter {recipe.adapter} traces it",
            )
        if recipe.method == "qlora" and recipe.quantization == "none":
            raise BadInput(
                "QLoRA needs a quantised base, and the recipe's quantization is 'none'",
                hint='Recipe(method="qlora", quantization="nf4-double"), or --quantization nf4-double; or method lora',
            )
        self.run: TaskRun = run_of(architecture)
        self.trainer: Trainer = profile or trainer(recipe.trainer)
        if not self.run.kbit_prepare:
            self.trainer = replace(self.trainer, kbit_prepare=False)
        self.one_row = self.trainer.packs_into_one_row and recipe.padding == "packing"
        if self.one_row:
            recipe = recipe.but(micro_batch=1, sequence_length=recipe.tokens)
        if recipe.context_parallel > 1:  # the recipe of one GPU: those that share sequences hold equal shares of each
            recipe = recipe.but(sequence_length=part(recipe.sequence_length, recipe.context_parallel))
        if architecture.fixed_length:
            recipe, padded = recipe.but(sequence_length=architecture.fixed_length), False
        if self.run.rows > 1:
            recipe = recipe.but(micro_batch=recipe.micro_batch * self.run.rows)
        if (runs := checkpointing_of(recipe)) != recipe.checkpointing:
            recipe = recipe.but(checkpointing=runs)
        stored = CODES[self.trainer.code].stored
        architecture = stored(architecture) if stored else architecture
        if self.trainer.rotary_caches:
            architecture = with_rotary_caches(architecture, BYTES[meaning(recipe).stored])
        self.architecture, self.recipe, self.gpu = architecture, recipe, gpu
        self.optimizer: Optimizer = optimizer(recipe.optimizer)
        if self.trainer.optimizer_in_backward:
            self.optimizer = replace(self.optimizer, in_backward=True)
        self.numerics: Numerics = numerics(recipe, self.trainer)
        if padded is None:
            # the texts of other tasks' batches differ in length, as in traces of them (Shape.padded)
            alike = self.architecture.trained_for == LANGUAGE
            worse_unmasked = alike and _worse_unmasked(architecture, recipe, gpu, self.numerics, self.trainer)
            apart = architecture.packed_masks or not self.one_row
            masked = (masks_needed(recipe) and apart) or self.run.sampled  # answers end where they like
            padded = masked and not worse_unmasked and recipe.context_parallel == 1
        self.padded = padded
        capability = gpu.compute_capability or (8, 0)
        sms, threads = gpu.sm_count or 108, threads_per_multiprocessor(capability)
        self.static: Static = static_of(
            architecture, recipe, self.numerics, self.optimizer, self.trainer, (sms, threads)
        )
        self.traced: Numerics = within_passes(self.numerics, recipe, self.trainer)
        self.share: Share = share_of(
            architecture, recipe, self.numerics, self.static, ends_in_root=self.trainer.ends_in_root
        )
        share = learned_share(architecture, recipe.sequence_length)
        target = architecture.shape.target if architecture.encoder_layers else 0
        dims = Dims(recipe.micro_batch, recipe.sequence_length, sms, threads, share, target)
        self.meter = meter_of(dims)
        self.workspace = cublas_workspace(capability)
        # input ids, labels, attention mask
        self.batch = (8 * recipe.tokens,) * self.run.indices + (8 * recipe.micro_batch * target,) * (target > 0)
        self.inputs = 4 * architecture.inputs * recipe.micro_batch

    @property
    def released(self) -> bool:
        """Return whether each gradient is freed as soon as it is used, so that they never exist together."""
        return self.share.release_gradients or self.optimizer.in_backward

    @property
    def accumulates(self) -> bool:
        """Return whether some forward passes begin while the gradients of earlier ones exist."""
        again = self.recipe.accumulation > 1 or self.trainer.zeroes_gradients
        return again and not self.optimizer.in_backward

    @property
    def tied_gradient(self) -> int:
        """Return the bytes of a tied embedding's gradient; 0 without one."""
        tied = self.architecture.tied and self.recipe.method == "full"
        return max(w.numel for w in self.architecture.embedding) * self.numerics.gradient if tied else 0

    @property
    def warmup(self) -> int:
        """Return the bytes that transformers requests and frees before it loads a quantised model onto the card."""
        onto_card = self.recipe.method == "qlora" and loading_of(self.recipe) != "host"
        return self.static.base if onto_card and self.trainer.warms_cache else 0

    def paged(self, phase: Phase) -> int:
        """Return one GPU's bytes of optimizer states in managed memory, after the first step of a run."""
        cards = self.recipe.num_gpus if self.recipe.shard != "none" else 1
        on_card = phase in PAGED_IN and self.recipe.offload == "none"
        return part(self.static.paged, cards) if on_card else 0

    def micro(self, *, accumulating: bool = False, train: bool = True) -> MicroStep:
        """Return the traced micro-step, cached by everything but the batch size."""
        r, a = self.recipe, self.architecture
        # a hand-written loop leaves the model's use_cache on, and the Trainer that of T5's stacks, whose configs are
        # copies; checkpointing switches it off in training
        cache = (self.trainer.name == "torch" and a.task == "causal-lm") or a.layers[0].attention.position_bias
        cache = cache and not (train and r.checkpointing != "none")
        shards = r.num_gpus if self.share.by_block else 0
        situation = Situation(
            self.padded, train, accumulating, cache, self.released, shards, mask_given=not self.one_row
        )
        key = (
            a, r.method, r.quantization, r.lora_rank, r.lora_targets, r.modules_to_save, r.lora_dropout > 0,
            r.checkpointing, r.attention, r.loss, self.traced, self.trainer, self.gpu.compute_capability, situation,
            tuple(w < r.sequence_length for w in _windows(a)), r.precision, r.micro_batch > 1,
            r.context_parallel, r.zero, r.fsdp_version,
        )  # fmt: skip
        known = _MICRO.get(key)
        if known is None:
            if len(_MICRO) > 4096:
                _MICRO.clear()
            known = _MICRO[key] = micro_step_of(a, r, self.traced, self.trainer, self.gpu.compute_capability, situation)
        return known

    def resident(
        self, *beside: AccountLine, states: bool, gradients: bool, buffers: int = 0
    ) -> tuple[AccountLine, ...]:
        """Return the static lines of a phase and those `beside` them, without the empty ones."""
        share = self.share
        lines: list[AccountLine] = [
            *self._weights,
            ("gradients", "gradients", share.gradients if gradients or share.lasting_gradients else 0),
            ("optimizer_states", "optimizer states", share.states if states or share.early_states else 0),
            ("temporaries", "communication buckets", share.buckets),
            ("temporaries", "gathered blocks", buffers),
            # Trainer.get_batch_samples fetches the inputs of all micro-batches at once
            ("activations", "batch", sum(self.batch) + self.inputs * self.recipe.accumulation),
            ("workspace", "cuBLAS workspaces", 2 * self.workspace),
        ]
        return tuple(line for line in (*lines, *beside) if line[2])

    @cached_property
    def _weights(self) -> tuple[AccountLine, ...]:
        """Return the static lines of weights, which are the same in every phase."""
        s, share = self.static, self.share
        scales = 0 if share.whole_scales else s.scales
        whole = share.weights / max(s.base + scales + s.upcast + s.adapter, 1)
        lines: list[AccountLine] = [
            ("parameters", "base weights", int(s.base * whole)),
            ("parameters", "buffers of the model", s.buffers),
            ("parameters", "quantisation scales", s.scales if share.whole_scales else int(s.scales * whole)),
            ("parameters", "fp32 copies (k-bit preparation)", int(s.upcast * whole)),
            ("parameters", "adapter weights", int(s.adapter * whole)),
            ("parameters", "trained copies of whole modules", s.saved),
            ("parameters", "fp32 master weights", share.master),
            ("parameters", "reference model", s.beside),
        ]
        return tuple(line for line in lines if line[2])

    def passes(self, phase: Phase, *, states: bool) -> list[Instant]:
        """Return the worst instants of forward and of backward, of the first and of a later micro-batch of a step."""
        found: list[Instant] = self.sampling(phase, states=states)
        accumulating = self.accumulates and (phase == "step" or self.recipe.accumulation > 1)
        for later in (False, True) if accumulating else (False,):
            for _, gathering in self._between(phase, later=later, states=states) if self.share.gathered else ():
                found.append(gathering)
            for stage in self._parts(phase, later=later, states=states):
                found.append(stage.top(self.meter))
        return found

    def within(self, phase: Phase, step: int | None, *, later: bool) -> Instant:
        """Return the worst instant within a step of a training pass, or of the optimizer step if `step` is None."""
        if step is None:
            return self.optimizer_step(phase)
        states = phase != "first_step"
        if step == GENERATION:
            return max(self.sampling(phase, states=states), key=lambda instant: instant.requested)
        parts = self._parts(phase, later=later, states=states)
        found = next(stage for stage in parts if step < len(stage.stretch.steps)).within(self.meter, step)
        gathering = [i for begin, i in self._between(phase, later=later, states=states) if begin == step]
        return max((found, *gathering), key=lambda instant: instant.requested)

    def every_instant(self, phase: Phase) -> Iterator[Instant]:
        """Yield the worst instant of every step of a phase and of its optimizer step."""
        for later in (False, True):
            for step in range(len(self.micro(accumulating=later).from_loss.steps)):
                yield self.within(phase, step, later=later)
        yield self.optimizer_step(phase)

    @cached_property
    def generation(self) -> Generation | None:
        """Return how the answers of a step are sampled, for a task that does."""
        if not self.run.sampled:
            return None
        capability = self.gpu.compute_capability
        return generation_of(self.architecture, self.recipe, self.traced, self.trainer, capability, self.meter.dims)

    def sampling(self, phase: Phase, *, states: bool) -> list[Instant]:
        """Return the instants of a generation: the pass over the prompts, and the choice of the last token."""
        if (made := self.generation) is None:
            return []
        still = {"states": states, "gradients": False}
        reading = self.resident(("temporaries", "pass over the prompts", made.reading), **still)
        cache: AccountLine = ("activations", "cache of keys and values", made.cache)
        last = self.resident(cache, ("temporaries", "scores of the next token", made.choosing), **still)
        return [Instant.of(phase, "generation", lines) for lines in (reading, last)]

    def _parts(self, phase: Phase, *, later: bool, states: bool) -> list[PassPart]:
        """Return the parts of a pass, in order of time."""
        micro, where = self.micro(accumulating=later), ", later micro-batch" if later else ""
        if self.share.gathered is not None:
            return self._gathered(phase, micro, where, states=states, gradients=later)
        kept = self._kept(micro, again=later or phase != "first_step")
        forward = PassPart(phase, micro.until_loss, self.resident(kept, states=states, gradients=later), where)
        lines = self.resident(self._unreleased, states=states, gradients=later)
        left = fold(micro.until_loss, self.meter).left
        return [forward, PassPart(phase, micro.from_loss, lines, where, left)]

    def _kept(self, micro: MicroStep, *, again: bool = True) -> AccountLine:
        """Return what the last loss of a loop that keeps it holds during a forward; `again`: there was one."""
        before = self.meter.bytes(micro.lingering) if self.trainer.keeps_loss and again else 0
        return "activations", "inputs kept by the graph of the step before", before

    @property
    def _unreleased(self) -> AccountLine:
        """Return the tied gradient that an optimizer in the backward keeps until its second half is added."""
        return "gradients", "gradient of the tied embedding", self.tied_gradient if self.optimizer.in_backward else 0

    def _gathered(
        self, phase: Phase, micro: MicroStep, where: str, *, states: bool, gradients: bool, parts: int | None = None
    ) -> list[PassPart]:
        """Return the first `parts` (None: all) parts of a pass that gathers weights."""
        share = self._share_in(phase)
        whole, streams = share.gathered, share.streams
        assert whole is not None and streams is not None
        found, left = list[PassPart](), 0
        levels = zip(micro.stages, astuple(whole)[1:], astuple(streams.gathered)[1:], strict=True)
        for number, (stretch, buffers, used) in enumerate(islice(levels, parts)):
            # sharded gradients fill up while whole ones come and go
            filling = gradients or (self.released and number >= BACKWARD)
            lines = self.resident(states=states, gradients=filling, buffers=buffers)
            idle = streams.gathering + streams.reducing - used - (streams.kept if filling else 0)
            found.append(PassPart(phase, stretch, lines, where, left, idle))
            left += fold(stretch, self.meter).left
        return found

    def _share_in(self, phase: Phase) -> Share:
        special = {"first_step": self.share.first, "eval": self.share.evaluated}.get(phase)
        return special or self.share

    def _between(
        self, phase: Phase, *, states: bool, later: bool = False, train: bool = True
    ) -> list[tuple[int, Instant]]:
        """Return the instants at which a group is gathered, during the forward beside the output of another.

        Each comes with the index of the step that begins then.
        """
        found: list[tuple[int, Instant]] = []
        if self.share.gathered is None:
            return found
        transitions = self._share_in(phase).transitions
        if transitions is None:
            return found
        micro, where = self.micro(accumulating=later, train=train), ", later micro-batch" if later else ""
        begins = {
            "first block": 1, "last block": len(micro.blocks), "head": len(micro.forward) - 1,
            "root": len(micro.until_loss.steps) if train else 0,
        }  # fmt: skip
        for (name, begin), buffers in zip(begins.items(), astuple(transitions), strict=True):
            if buffers and begin:
                lines = self.resident(states=states, gradients=later, buffers=buffers)
                top = fold(micro.before(begin) if begin < len(micro.forward) else micro.until_loss, self.meter)
                kept = Peak(top.left, top.stretch, begin, None, top.left)
                found.append((begin, Instant.of(phase, f"gathering the {name}{where}", lines, top.left, kept)))
        return found

    def optimizer_step(self, phase: Phase) -> Instant:
        """Return the optimizer step: all gradients and states exist, and the step's own buffers."""
        whole = self.share.states / max(self.static.states, 1) if self.static.states else 1.0
        stepping = int(self.static.step_bytes * whole) if self.recipe.offload == "none" else 0
        buffers: AccountLine = ("temporaries", "optimizer step buffers", max(stepping, self.share.step_bytes))
        lines = self.resident(self._unreleased, buffers, states=True, gradients=not self.optimizer.in_backward)
        streams = self.share.streams
        idle = streams.gathering + streams.reducing - streams.kept if streams and self.recipe.zero else 0
        return Instant.of(phase, "optimizer step", lines, idle=idle)

    def evaluation(self) -> Instant:
        """Return the worst instant of a forward without gradients, gathering of weights included."""
        if sampled := self.sampling("eval", states=True):
            return max(sampled, key=lambda instant: instant.requested)
        micro, share = self.micro(train=False), self.share.evaluated or self.share
        if share.gathered is None:
            lines = self.resident(self._kept(self.micro(accumulating=False)), states=True, gradients=False)
            top = fold(micro.until_loss, self.meter)
            return Instant.of("eval", _named(top), lines, top.height, top)
        parts = self._gathered("eval", micro, "", states=True, gradients=False, parts=FORWARD)
        found = [stage.top(self.meter) for stage in parts]
        found += (instant for _, instant in self._between("eval", states=True, train=False))
        if share.transitions is None:
            lines = self.resident(states=True, gradients=False, buffers=share.gathered.entry)
            found.append(Instant.of("eval", "gathering the embedding", lines))
        return max(found, key=lambda instant: instant.requested)

    def load(self) -> Instant:
        """Return the end of loading, with the weight that is quantised or widened, or adapters before their cast."""
        whole, converted, wrapping = 0, self._converted, self.share.loading
        if self.share.by_block:
            whole = whole_at_load(self.architecture, self.recipe, self.numerics, self.static) + self._share_on_its_way
        kept = ("parameters", "gradients", "optimizer_states")
        lines = [line for line in self.resident(states=False, gradients=False) if line[0] in kept]
        lines += [
            ("temporaries", "weights being converted", converted if converted > wrapping else 0),
            ("temporaries", "whole weights before they are sharded", whole),
            ("temporaries", "weights being flattened, sharded or broadcast", 0 if converted > wrapping else wrapping),
            ("workspace", "cuBLAS workspaces", self.workspace * (self.static.multiplies and not self.share.by_block)),
        ]
        return Instant.of("load", "loading weights", tuple(line for line in lines if line[2]))

    @property
    def _converted(self) -> int:
        """Return the most bytes that exist only while weights are converted, before the model is wrapped."""
        if loading_of(self.recipe) == "host":
            return 0
        if self.recipe.method != "qlora" or not (self.recipe.zero and self.trainer.kbit_prepare):
            s = self.static
            if self.recipe.shard != "none":  # adapters are not cast again
                return s.passing
            return s.loading
        # the fp32 copies of k-bit preparation, which DeepSpeed casts back before it shards anything
        wide = static_of(self.architecture, self.recipe, replace(self.numerics, other=4), self.optimizer, self.trainer)
        whole = self.static.base + self.static.scales + self.static.adapter
        return wide.upcast + wide.passing + whole - self.share.weights

    @property
    def buckets(self) -> list[int]:
        """Return the bytes of DDP's buckets."""
        r = self.recipe
        trained = trained_weights(
            self.architecture, r.method, r.lora_rank, r.lora_targets, self.numerics, r.modules_to_save
        )
        return buckets(trained)

    @property
    def prepared(self) -> bool:
        """Return whether PEFT's prepare_model_for_kbit_training runs, which ends by emptying the cache."""
        return self.recipe.method == "qlora" and self.trainer.kbit_prepare

    @property
    def caches_loading(self) -> bool:
        """Return whether what passed while loading stays cached: DDP empties no cache after its broadcast."""
        return self.recipe.num_gpus > 1 and not self.recipe.zero and self.recipe.shard == "none"

    @property
    def _share_on_its_way(self) -> int:
        """Return the bytes of the largest share on its way to or from the host, beside the whole weight."""
        size = self.static.largest * self.numerics.weight
        return part(size, self.recipe.num_gpus) if self.recipe.offloaded_by_fsdp else 0

    def save(self) -> Instant:
        """Return the saving of a checkpoint; a full state dict of sharded weights is gathered on the card."""
        return Instant.of("save", "saving a checkpoint", self.resident(self.copied, states=True, gradients=False))

    @property
    def copied(self) -> AccountLine:
        """Return what is made on the card for a checkpoint."""
        if self.recipe.shard == "parameters":
            whole = self.static.largest * self.numerics.weight + self._share_on_its_way
            return "temporaries", "gathered for the state dict", whole
        apart = taken_apart(self.architecture, self.recipe, self.numerics)
        return "temporaries", "experts one by one for the checkpoint", apart

    @property
    def resumes(self) -> bool:
        """Return whether resuming loads a checkpoint into a model that is already on the card, as in transformers."""
        return self.trainer.code == "transformers" and self.trainer.name != "torch" and self.recipe.num_gpus == 1

    @property
    def again(self) -> Static:
        """Return the static bytes after resuming.

        PEFT loads 16-bit adapters in fp32, and bitsandbytes loads paged states onto the card.
        """
        if not self.resumes:
            return self.static
        narrow = self.recipe.method != "full" and self.numerics.adapter != 4
        if not narrow and not self.optimizer.paged:
            return self.static
        wide = replace(self.numerics, adapter=4) if narrow else self.numerics
        return static_of(self.architecture, self.recipe, wide, replace(self.optimizer, paged=False), self.trainer)

    def resume(self) -> Instant:
        """Return the worst instant of resuming.

        transformers loads optimizer states to the host on one GPU, but straight onto each of several.
        """
        return max(self._states_loaded(), self._weights_loaded(), key=lambda instant: instant.requested)

    def _weights_loaded(self) -> Instant:
        """Return the loading of the weights, which rank 0 under FSDP2 puts on the card whole, one by one.

        A tied head counts as trained: PyTorch identifies frozen weights by name, and it has two
        (torch.distributed.checkpoint.state_dict, 2.13).
        """
        saved = self.recipe.method == "full" or self.architecture.tied
        gathered = self.share.by_block and self.trainer.code == "transformers" and saved
        gathered = gathered and not self.recipe.offloaded_by_fsdp  # it stays on the host
        whole = self.static.largest * self.numerics.weight if gathered else 0
        lines = self.resident(
            ("temporaries", "a weight of the checkpoint, whole", whole), states=False, gradients=False
        )
        return Instant.of("resume", "loading weights", lines)

    def _states_loaded(self) -> Instant:
        """Return the loading of the optimizer states, beside the live ones on several GPUs."""
        r, again = self.recipe, self.again
        more = again.states - self.static.states if r.offload == "none" else 0
        adapters = again.adapter * (r.method != "full") - again.states if self.resumes else 0
        lines = self.resident(
            ("optimizer_states", "states as loaded, beside the live ones", self.share.states * (r.num_gpus > 1)),
            ("parameters", "adapters loaded in fp32", again.adapter - self.static.adapter),
            ("optimizer_states", "states as they are loaded", more),
            ("temporaries", "adapters of the file, before the states", max(adapters, 0)),
            states=True, gradients=False,
        )  # fmt: skip
        return Instant.of("resume", "loading optimizer states", lines)

    @property
    def merging(self) -> tuple[Merge, ...]:
        """Return the merges of adapters into the weights of one block of every kind, after resuming."""
        adapter = 4 if self.resumes else self.numerics.adapter
        return tuple(merge_of(w, self.recipe, self.numerics, adapter) for w in self.static.adapted)

    def merge(self) -> Instant:
        """Return the merging of the adapter into the base, one matrix at a time, in the process that trained it."""
        most = max((m.peak for m in self.merging), default=0)
        lines = (
            *self._states_loaded().static, self._kept(self.micro(accumulating=False)),
            ("parameters", "replaced weights kept by the graph of the last step", self._replaced),
            ("temporaries", "delta and merged weight", most),
        )  # fmt: skip
        return Instant.of("merge", "merging the adapter", tuple(line for line in lines if line[2]))

    @property
    def _replaced(self) -> int:
        """Return the bytes of the 4-bit weights that merging has replaced before its last one, where they stay.

        bitsandbytes' MatMul4Bit holds its weight and scales as attributes of its node, which no backward clears.
        """
        r = self.recipe
        if not self.trainer.keeps_loss or r.method != "qlora" or r.quantization == "int8":
            return 0
        row = (QUANTIZATIONS | CHECKPOINTS)[r.quantization]
        names = adapted(self.architecture, r.lora_targets)
        weights = (w for layer in self.architecture.layers for w in layer.weights if has_adapter(w, names))
        return sum([row.bytes(w.numel, w.shape[-2]) for w in weights][:-1])

    def instants(self) -> list[Instant]:
        """Return the worst instants of every phase."""
        return [
            self.load(), *self.passes("first_step", states=False), self.optimizer_step("first_step"),
            *self.passes("step", states=True), self.optimizer_step("step"), self.evaluation(), self.save(),
            self.resume(), *([] if self.recipe.method == "full" else [self.merge()]),
        ]  # fmt: skip


def masks_needed(recipe: Recipe) -> bool:
    """Return whether batches need a mask: padded ones do, and packed ones without flash-attn's varlen kernel."""
    if recipe.padding == "packing":
        return recipe.attention != "flash"
    return recipe.micro_batch > 1


def _worse_unmasked(a: Architecture, r: Recipe, gpu: Gpu, n: Numerics, t: Trainer) -> bool:
    """Return whether a batch of samples of one length needs more than a padded one.

    Such a batch has no mask, so grouped keys are not repeated before the kernel is chosen, and where no fused kernel
    takes grouped heads the math kernel writes out all scores.
    """
    if r.padding == "packing" or t.code != "transformers":
        return False
    width, cc = kernel_width(r, n), gpu.compute_capability
    pairs = ([attention_kernel(x.attention, r, width, cc, masked) for masked in (False, True)] for x in a.kinds)
    return any(unmasked == "math" != masked for unmasked, masked in pairs)


GENERATION = -1  # in place of the index of a step: the sampling before the first
FORWARD = 2  # parts of a pass without gradients, in the order of `Gathered` from its second field on: blocks, loss
BACKWARD = 3  # the first part of a pass, in the order of `Gathered`, in which gradients of blocks exist
_MICRO: dict[tuple[Any, ...], MicroStep] = {}


@lru_cache(maxsize=64)
def _windows(a: Architecture) -> tuple[int, ...]:
    return tuple(sorted({layer.attention.window for layer in a.kinds if layer.attention.window is not None}))


def _named(peak: Peak) -> str:
    step = peak.step
    if step is None:  # at the beginning of a step
        step = peak.stretch.steps[peak.done] if peak.stretch.begin < peak.done < len(peak.stretch.steps) else None
    if step is None:
        return "forward"
    return f"forward of {step.part.title}" if step.instant == "forward" else step.instant


def taken_apart(a: Architecture, r: Recipe, n: Numerics) -> int:
    """Return the bytes of the copies of all experts' joint gate and up projections while a whole model is saved."""
    if r.method != "full" or a.stored_stacked:
        return 0
    weights = (w for layer in a.layers for w in layer.weights if w.kind == "experts" and w.module == "gate_up_proj")
    return sum(w.numel for w in weights) * n.weight
