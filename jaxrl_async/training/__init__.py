"""The trainer: packing, train step, objectives, supervised fine-tuning."""
