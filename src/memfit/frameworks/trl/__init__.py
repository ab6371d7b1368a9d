"""A train.py around TRL's SFTTrainer."""
