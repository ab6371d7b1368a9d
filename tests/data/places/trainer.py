"""A language model under the Trainer: training in 16 bits, evaluation that keeps logits, the optimizer's first step."""

import sys

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

config = LlamaConfig(
    vocab_size=4000, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)
model = AutoModelForCausalLM.from_config(config)
rows = [[1] * 64] * 16
data = Dataset.from_dict({"input_ids": rows, "labels": rows})
settings = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=4, max_steps=2, eval_strategy="steps", eval_steps=1, save_steps=1,
    bf16=True, report_to="none", disable_tqdm=True,
)  # fmt: skip
Trainer(model, settings, train_dataset=data, eval_dataset=data).train()
resumed = Trainer(AutoModelForCausalLM.from_config(config), settings, train_dataset=data, eval_dataset=data)
resumed.train(resume_from_checkpoint=True)
with torch.no_grad():
    model.eval().generate(torch.ones(2, 4, dtype=torch.long, device="cuda"), max_new_tokens=3, do_sample=False)
