"""What a run will need and cost, told before it starts."""
