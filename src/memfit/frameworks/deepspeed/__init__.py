"""DeepSpeed's ds_config.json."""
