"""Where prompts come from, and how they are split, numbered and made."""
