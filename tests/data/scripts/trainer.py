"""transformers' Trainer on a model by name: LoRA, evaluation each step, checkpoints, a tokenizer and local data."""

import sys

from datasets import load_dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
)

MODEL, DATA = sys.argv[1], sys.argv[2]
tokenizer = AutoTokenizer.from_pretrained(MODEL)
if tokenizer.pad_token is None:
    tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="bfloat16", device_map="auto")
model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
model.print_trainable_parameters()

data = load_dataset("json", data_files=DATA, split="train")
data = data.map(lambda row: tokenizer(row["text"], truncation=True, max_length=256), remove_columns=["text"])
halves = data.train_test_split(test_size=0.2, seed=0)
arguments = TrainingArguments(
    "trainer-output", per_device_train_batch_size=4, gradient_accumulation_steps=2, num_train_epochs=3, bf16=True,
    eval_strategy="steps", eval_steps=1, save_steps=2, save_total_limit=1, logging_steps=1, report_to=[],
    dataloader_num_workers=2,
)  # fmt: skip
trainer = Trainer(
    model=model, args=arguments, train_dataset=halves["train"], eval_dataset=halves["test"],
    data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
)  # fmt: skip
trainer.train()
print(trainer.evaluate())
trainer.save_model("trainer-final")
tokenizer.save_pretrained("trainer-final")
