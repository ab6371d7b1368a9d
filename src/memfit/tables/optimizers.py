"""The optimizer table: exact bytes of states and of the step, and the settings that choose it in each framework.

A new optimizer is one row. Rows were measured on PyTorch 2.13 and bitsandbytes 0.49 unless `note` says "derived".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from memfit.errors import UnknownName
from memfit.nouns.architecture import Weight

Settings = Mapping[str, Mapping[str, Any]]
OPTIM_KEYS = {"axolotl": "optimizer"}  # framework -> its key of `hf_name`, where that is not `optim`


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """One row: states per parameter, temporaries of the step, and names in frameworks."""

    key: str  # what --optimizer takes
    title: str
    moments: int  # full-size state tensors per parameter
    width: float | None = None  # bytes per element of a state; None: as wide as the parameter
    block: int = 0  # elements per fp32 scale of a quantised state
    smallest: int = 0  # tensors with fewer elements keep fp32 states
    tables: int = 0  # bytes shared by all parameters (quantisation maps)
    factored: bool = False  # rows + columns in fp32 instead of a full matrix
    rank_of: int = 0  # GaLore/APOLLO: states live in a space of this rank
    step_copies: float = 0.0  # step() makes this many copies of all trained weights at once (foreach)
    step_tensors: tuple[int, int] = (0, 0)  # step() goes weight by weight: temporaries for a 2-byte, a 4-byte weight
    step_width: int | None = None  # ... bytes per element of such a temporary; None: as wide as the weight
    step_counter: int = 0  # bytes of `step` kept on the card per parameter tensor
    paged: bool = False  # states of tensors with >= 1e5 elements live in host-backed managed memory
    in_backward: bool = False  # gradients are consumed as they appear
    flops: float = 0.0  # extra step work relative to AdamW, for the time model
    hf_name: str = ""  # transformers' `optim`, which axolotl and LLaMA-Factory take as well; "": no such switch
    aliases: tuple[str, ...] = ()  # other names that files give it
    # framework -> the settings that choose it, where `hf_name` alone does not
    settings: Settings = field(default_factory=dict, hash=False)
    loop: str = ""  # its class in a hand-written training loop; "": the loop of memfit trace does not support it
    arguments: Mapping[str, Any] = field(default_factory=dict, hash=False)  # of that class
    matrices_only: bool = False  # that class does not accept vectors
    instead: str = "--optimizer adamw"  # the hint where a framework has no switch for it
    package: str = "torch"
    images: bool = False  # of SimpleTuner, for the denoisers of images and videos alone
    note: str = ""

    def settings_in(self, framework: str) -> Mapping[str, Any]:
        """Return the settings that choose this optimizer in a framework's file; {} where it has no switch for it."""
        plain = {OPTIM_KEYS.get(framework, "optim"): self.hf_name} if self.hf_name else {}
        return self.settings.get(framework, plain)

    def state_tensors(self, weight: Weight, itemsize: int) -> tuple[int, ...]:
        """Return the bytes of each state tensor on the card for a trained weight of `itemsize` bytes per element."""
        n = weight.numel
        counter = (self.step_counter,) if self.step_counter else ()
        if self.factored:
            return _rows_and_columns(weight) if len(weight.shape) > 1 else (4 * n,)
        if self.rank_of and len(weight.shape) == 2:
            small, big = sorted(weight.shape)
            rank = min(self.rank_of, small)
            return (4 * rank * big, 4 * rank * big, 4 * small * rank)
        if self.width is None:
            return (n * itemsize,) * self.moments + counter
        if n < self.smallest:
            return (4 * n,) * self.moments + counter
        payload = () if self.paged and n >= PAGED_FROM else (int(n * self.width),)
        scales = (4 * -(-n // self.block),) if self.block else ()
        return (*payload, *scales) * self.moments + counter

    def state_bytes(self, weight: Weight, itemsize: int) -> int:
        """Return the bytes of all states of one trained weight on the card."""
        return sum(self.state_tensors(weight, itemsize))

    def paged_bytes(self, weight: Weight) -> int:
        """Return the bytes of the states of one trained weight that are in managed memory."""
        paged = self.paged and weight.numel >= max(PAGED_FROM, self.smallest)
        return self.moments * int(weight.numel * (self.width or 0)) if paged else 0

    def in_32bit(self) -> Optimizer:
        """Return the optimizer with fp32 states: bitsandbytes' `register_module_override(..., {"optim_bits": 32})`."""
        return replace(self, width=4, block=0)

    def step_temporaries(
        self, weights: Sequence[tuple[int, int]], staging: Sequence[int] = ()
    ) -> tuple[tuple[int, ...], ...]:
        """Return the temporaries of step() in groups, in order, for (elements, itemsize) of every trained weight.

        foreach works on all weights in one group. A loop makes one group per weight; the last temporary of a weight
        lives until the next weight has made its own (a local variable is rebound, not deleted). staging: bytes of the
        buffer that a mean over each weight's update takes beside it and what was made before it.
        """
        if self.step_copies and weights:
            return (tuple(int(self.step_copies * n * size) for n, size in weights),)
        groups = []
        for (n, size), buffer in zip(weights, staging or [0] * len(weights), strict=True):
            count, bytes_each = self.step_tensors[size == 4], n * (self.step_width or size)
            if count:
                groups.append((bytes_each,) * count)
            if count and buffer:  # when the update, the last of the group, was made, but not yet what takes its place
                groups += [(*groups[-1][2:], buffer, 0), groups[-1]]
        return tuple(groups)

    def step_bytes(self, weights: Sequence[tuple[int, int]], staging: Sequence[int] = ()) -> int:
        """Return the bytes that step() needs beyond states and gradients at its worst instant."""
        worst = before = 0
        for group in self.step_temporaries(weights, staging):
            worst = max(worst, sum(group) + before)
            before = group[-1] if group and not self.step_copies else 0
        return worst


PAGED_FROM = 100_000  # bitsandbytes: get_state_buffer pages tensors of at least 1e5 elements


def _rows_and_columns(weight: Weight) -> tuple[int, ...]:
    lead = weight.numel // (weight.shape[-1] * weight.shape[-2])
    return 4 * lead * weight.shape[-2], 4 * lead * weight.shape[-1]


_ROWS = (
    Optimizer(
        key="adamw", title="AdamW (fused)", moments=2, step_counter=4, hf_name="adamw_torch_fused",
        loop="torch.optim.AdamW", arguments={"fused": True},
    ),
    Optimizer(
        key="adamw-foreach", title="AdamW (foreach)", moments=2, step_copies=1, hf_name="adamw_torch",
        aliases=("adamw_hf",), loop="torch.optim.AdamW",
        note="torch's default on CUDA: one extra copy of all trained weights during the step",
    ),
    Optimizer(
        key="adamw-forloop", title="AdamW (for-loop)", moments=2, step_tensors=(2, 2), loop="torch.optim.AdamW",
        arguments={"foreach": False, "fused": False},
        instead="--optimizer adamw: the fused step needs no temporaries either",
        note="foreach=False: two copies of a weight and one of the weight before it",
    ),
    Optimizer(
        key="adamw-32bit", title="AdamW 32-bit (bitsandbytes)", moments=2, width=4,
        loop="bitsandbytes.optim.AdamW32bit", package="bitsandbytes",
        note="fp32 states whatever the weights are stored in",
    ),
    Optimizer(
        key="adamw-8bit", title="AdamW 8-bit (bitsandbytes)", moments=2, width=1, block=256, smallest=4096,
        tables=2048, hf_name="adamw_bnb_8bit", aliases=("adamw_8bit",), loop="bitsandbytes.optim.AdamW8bit",
        package="bitsandbytes",
    ),
    Optimizer(
        key="adamw-8bit-torchao", title="AdamW 8-bit (torchao)", moments=2, width=1, block=256, smallest=4096,
        step_tensors=(3, 3), step_width=4, hf_name="adamw_torch_8bit", aliases=("ao_adamw_8bit",), package="torchao",
        note="its compiled step makes fp32 copies of one weight: Inductor of PyTorch 2.13 plans 2; 3 are counted, as "
        "a run of 2024 needed more",
    ),
    Optimizer(
        key="adamw-4bit", title="AdamW 4-bit (torchao)", moments=2, width=0.5, block=128, smallest=4096,
        step_tensors=(6, 6), step_width=4, hf_name="adamw_torch_4bit", aliases=("ao_adamw_4bit",), package="torchao",
        note="its compiled step makes 2 fp32 and 2 int64 copies of one weight (Inductor of PyTorch 2.13)",
    ),
    Optimizer(
        key="paged-adamw-32bit", title="paged AdamW 32-bit", moments=2, width=4, paged=True,
        hf_name="paged_adamw_32bit", aliases=("paged_adamw",), loop="bitsandbytes.optim.PagedAdamW32bit",
        package="bitsandbytes",
    ),
    Optimizer(
        key="paged-adamw-8bit", title="paged AdamW 8-bit", moments=2, width=1, block=256, smallest=4096, tables=2048,
        paged=True, hf_name="paged_adamw_8bit", loop="bitsandbytes.optim.PagedAdamW8bit", package="bitsandbytes",
    ),
    Optimizer(
        key="adafactor", title="Adafactor (transformers)", moments=0, factored=True, step_tensors=(4, 2),
        step_width=4, hf_name="adafactor", loop="transformers.optimization.Adafactor",
        arguments={"scale_parameter": False, "relative_step": False}, package="transformers",
        note="fp32 rows and columns; fp32 copies of one 16-bit weight and its gradient during the step",
    ),
    Optimizer(
        key="lion", title="Lion 32-bit", moments=1, width=4, hf_name="lion_32bit",
        loop="bitsandbytes.optim.Lion32bit", package="bitsandbytes",
    ),
    Optimizer(
        key="lion-8bit", title="Lion 8-bit", moments=1, width=1, block=256, smallest=4096, tables=1024,
        hf_name="lion_8bit", loop="bitsandbytes.optim.Lion8bit", package="bitsandbytes",
    ),
    Optimizer(
        key="adamw-bf16", title="SimpleTuner's AdamW for bf16", moments=3, width=2, step_tensors=(6, 5),
        loop="memfit.virtual.jobs.corrected_adamw.AdamWBF16", images=True,
        note="two moments and a correction of each weight; derived",
    ),
    Optimizer(key="sgd", title="SGD", moments=0, hf_name="sgd", loop="torch.optim.SGD"),
    Optimizer(
        key="sgd-momentum", title="SGD with momentum", moments=1, hf_name="sgd",
        settings={
            "transformers": {"optim": "sgd", "optim_args": "momentum=0.9"},
            "llamafactory": {"optim": "sgd", "optim_args": "momentum=0.9"},
            "axolotl": {"optimizer": "sgd", "optim_args": {"momentum": 0.9}},
        }, loop="torch.optim.SGD", arguments={"momentum": 0.9},
    ),
    Optimizer(
        key="muon", title="Muon (torch)", moments=1, step_tensors=(5, 3),
        settings={
            "axolotl": {"optimizer": "muon"},
            "llamafactory": {"optim": "adamw_torch", "use_muon": True},
        }, loop="torch.optim.Muon", matrices_only=True, instead="--optimizer adamw-8bit, or --target axolotl",
        note="one momentum; Newton-Schulz on the largest matrix: 12 B (fp32) or 10 B (bf16) per element",
    ),
    Optimizer(
        key="galore", title="GaLore AdamW (rank 128)", moments=2, rank_of=128, step_tensors=(2, 2), step_width=4,
        hf_name="galore_adamw",
        settings={
            "transformers": {"optim": "galore_adamw", "optim_target_modules": "all-linear", "optim_args": "rank=128"},
            "axolotl": {"optimizer": "galore_adamw", "optim_target_modules": "all_linear", "optim_args": {"rank": 128}},
            "llamafactory": {"optim": "adamw_torch", "use_galore": True, "galore_target": "all", "galore_rank": 128},
        }, package="galore-torch", note="derived: moments in rank 128, projector in fp32",
    ),
    Optimizer(
        key="apollo", title="APOLLO AdamW (rank 128)", moments=2, rank_of=128, step_tensors=(2, 2), step_width=4,
        hf_name="apollo_adamw",
        settings={
            "transformers": {"optim": "apollo_adamw", "optim_target_modules": "all-linear", "optim_args": "rank=128"},
            "axolotl": {"optimizer": "apollo_adamw", "optim_target_modules": "all_linear", "optim_args": {"rank": 128}},
            "llamafactory": {"optim": "adamw_torch", "use_apollo": True, "apollo_target": "all", "apollo_rank": 128},
        }, package="apollo-torch", note="derived: as GaLore",
    ),
    Optimizer(
        key="adamw-in-backward", title="AdamW in backward", moments=2, step_counter=4, in_backward=True,
        instead="--optimizer adamw-8bit or adafactor, or write the training loop yourself",
        note="gradients never exist together; no clipping, no accumulation",
    ),
)  # fmt: skip

OPTIMIZERS: dict[str, Optimizer] = {row.key: row for row in _ROWS}


def optimizer(key: str) -> Optimizer:
    """Return the row of an optimizer by its key or by transformers' `optim`. Raises UnknownName."""
    name = key.strip().lower().replace("_", "-")
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    for row in _ROWS:
        if row.hf_name and row.hf_name.replace("_", "-") == name:
            return row
    raise UnknownName("optimizer", key, OPTIMIZERS)


def optimizer_named(name: str) -> Optimizer | None:
    """Return the row of an optimizer as a framework's file names it; None where memfit has none."""
    return _BY_NAME.get(name.replace("_", "-"))


# reversed, so that the first of two rows with the same name wins
_BY_NAME = {
    name.replace("_", "-"): row for row in reversed(_ROWS) for name in (row.key, *row.aliases, row.hf_name) if name
}
