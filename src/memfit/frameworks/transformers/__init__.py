"""transformers' TrainingArguments and a train.py around its Trainer."""
