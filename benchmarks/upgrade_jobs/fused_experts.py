"""Load a mixture of experts whose checkpoint has one matrix an expert, and train its norms."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

LAYERS, EXPERTS, HIDDEN, INNER, VOCABULARY = 2, 16, 1024, 768, 1024


def write(folder: Path) -> None:
    """Write the checkpoint in the format in which such models are published."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
    shapes["model.norm.weight"] = (HIDDEN,)
    for layer in range(LAYERS):
        name = f"model.layers.{layer}"
        shapes |= {f"{name}.{norm}.weight": (HIDDEN,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{name}.self_attn.{one}_proj.weight": (HIDDEN, HIDDEN) for one in "qkvo"}
        shapes |= {f"{name}.self_attn.{one}_norm.weight": (HIDDEN // 8,) for one in "qk"}
        shapes[f"{name}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            one = f"{name}.mlp.experts.{expert}"
            shapes |= {f"{one}.{part}_proj.weight": (INNER, HIDDEN) for part in ("gate", "up")}
            shapes[f"{one}.down_proj.weight"] = (HIDDEN, INNER)
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, moe_intermediate_size=INNER, num_hidden_layers=LAYERS,
        head_dim=HIDDEN // 8, num_attention_heads=8, num_key_value_heads=8, num_experts_per_tok=2,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    said = config.to_dict() | {"num_experts": EXPERTS, "num_local_experts": EXPERTS}  # as 4.57 and as 5 name it
    (folder / "config.json").write_text(json.dumps(said))


def main(folder: str) -> None:
    """Train for two steps."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map="cuda")
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dim() == 1)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for _ in range(2):
        ids = torch.randint(0, VOCABULARY, (1, 64), device="cuda")
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    if sys.argv[1] == "--write":
        write(Path(sys.argv[2]))
    else:
        main(sys.argv[1])
