"""TRL's SFTTrainer on sequences that the GPUs share: its mesh is in accelerate's file. Usage: LENGTH CHECKPOINTING."""

import sys

from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

length = int(sys.argv[1])
rows = Dataset.from_dict({"input_ids": [[1] * length] * 8})
config = LlamaConfig(
    hidden_size=1024, intermediate_size=512, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=4,
    head_dim=64, vocab_size=2048, max_position_embeddings=length, tie_word_embeddings=False,
)  # fmt: skip
arguments = SFTConfig(
    output_dir=sys.argv[3], max_length=length, per_device_train_batch_size=1, bf16=True, max_steps=2, report_to=[],
    gradient_checkpointing=sys.argv[2] == "full", save_strategy="no",
)  # fmt: skip
tokenizer = AutoTokenizer.from_pretrained("meta-llama/Llama-2-7b-hf")
SFTTrainer(LlamaForCausalLM(config), args=arguments, train_dataset=rows, processing_class=tokenizer).train()
