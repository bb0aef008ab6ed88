"""reasoning-gym as a source of items, which separate processes make."""
