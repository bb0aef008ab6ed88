"""Sources of questions, and the prompts that are made from their items."""
