"""Measure how unevenly the routers of new transformers send tokens to experts, which `--answer routing=uneven` assumes.

usage: python benchmarks/new_routers.py [--layers 12] [--width 512] [--experts 8] [--choices 2] [--sequences 4]
                                        [--models 12] [--last N] [--sinkhorn] [--groups 4 2]

Draws models as GPT initialises them (weights of deviation 0.02, those that end a residual branch divided by the root
of twice the number of layers) and tokens by Zipf's law, runs them on the CPU, and counts the tokens of each expert. For
each number of ranks it prints the deviation of the share of a rank, of one layer and of the sum of all layers, and the
chance that two tokens choose alike which follows from each. A chance that is the same for both says that layers route
independently. --last counts the last layers only, as the last stage of a pipeline has them; --sinkhorn balances the
choices of each micro-batch as Megatron-LM's routers of that kind do in training; --groups takes each token's experts
from the groups with the highest scores, as DeepSeek-V3. Two minutes for 12 models.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor
from torch.nn.functional import embedding, gelu, layer_norm, scaled_dot_product_attention

from memfit.virtual.device.routing import variance_of_token

WORDS, LENGTH, HEAD, DEVIATION = 50_000, 1024, 64, 0.02


def sinkhorn(scores: Tensor) -> Tensor:
    """Return scores whose exponentials are scaled until all tokens, and all experts, have equal sums."""
    scaled = scores.exp()
    for _ in range(100):
        scaled = scaled / scaled.sum(1, keepdim=True)
        scaled = scaled / scaled.mean(0)
    return scaled


def loads(options: argparse.Namespace, seed: int) -> Tensor:
    """Return how many times its even share of the tokens each expert of each layer of a new model gets."""
    draw = torch.Generator().manual_seed(seed)
    width, experts, k = options.width, options.experts, options.choices

    def weight(*sizes: int, deviation: float = DEVIATION) -> Tensor:
        return torch.randn(*sizes, generator=draw) * deviation

    last = DEVIATION / math.sqrt(2 * options.layers)  # of what ends a branch
    often = 1 / torch.arange(1.0, WORDS + 1)
    tokens = torch.multinomial(often, options.sequences * LENGTH, replacement=True, generator=draw)
    hidden = embedding(tokens.view(options.sequences, LENGTH), weight(WORDS, width)) + weight(LENGTH, width)
    found = []
    for _ in range(options.layers):
        qkv = layer_norm(hidden, (width,)) @ weight(width, 3 * width)
        q, key, v = qkv.view(options.sequences, LENGTH, 3, -1, HEAD).permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, key, v, is_causal=True).transpose(1, 2).flatten(2)
        hidden = hidden + mixed @ weight(width, width, deviation=last)
        normed = layer_norm(hidden, (width,)).flatten(0, 1)
        every = normed @ weight(width, experts)
        count, offered = options.groups
        best = every.unflatten(1, (count, -1)).topk(max(k // offered, 1)).values.sum(2).topk(offered).indices
        left_out = torch.ones(len(every), count, dtype=torch.bool).scatter_(1, best, False)
        limited = every.masked_fill(left_out.repeat_interleave(experts // count, 1), -math.inf)
        taken = (sinkhorn(every) if options.sinkhorn else limited).topk(k).indices
        scores = every.gather(1, taken)
        made = torch.zeros_like(normed)
        for expert in range(experts):
            which, choice = (taken == expert).nonzero(as_tuple=True)
            inner = gelu(normed[which] @ weight(width, 2 * width)) @ weight(2 * width, width, deviation=last)
            made[which] += inner * scores.softmax(-1)[which, choice, None]
        hidden = hidden + made.view_as(hidden)
        found.append(taken.flatten().bincount(minlength=experts) / (len(normed) * k / experts))
    return torch.stack(found)


@torch.no_grad()
def main() -> None:
    """Print a line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 12), ("width", 512), ("experts", 8), ("choices", 2), ("sequences", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--models", type=int, default=12)
    parser.add_argument("--last", type=int, help="layers to count, the last ones; all")
    parser.add_argument("--groups", type=int, nargs=2, default=(1, 1), help="groups of experts, of which a token takes")
    parser.add_argument("--sinkhorn", action="store_true", help="balance the choices of a micro-batch")
    options = parser.parse_args()
    experts, k, groups = options.experts, options.choices, tuple(options.groups)
    counted = options.last or options.layers
    drawn = torch.stack([loads(options, seed)[-counted:] for seed in range(options.models)])
    print("| ranks | one layer | chance | sum of layers | chance | fullest layer | fullest sum |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for ranks in (2**n for n in range(1, int(math.log2(experts)) + 1)):
        shares = drawn.unflatten(2, (ranks, -1)).mean(3)  # [model, layer, rank]
        of_token = variance_of_token(k, experts, experts // ranks, groups)
        one, total = (part.var(unbiased=False).item() for part in (shares, shares.mean(1)))
        print(
            f"| {ranks} | {math.sqrt(one):.3f} | {one / of_token:.3g} | {math.sqrt(total):.3f} "
            f"| {total * counted / of_token:.3g} | {shares.max():.2f} | {shares.mean(1).max():.2f} |"
        )


if __name__ == "__main__":
    main()
