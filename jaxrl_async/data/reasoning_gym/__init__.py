"""reasoning-gym as a source of items; its questions are made by processes."""
