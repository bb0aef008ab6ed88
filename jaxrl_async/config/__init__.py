"""What a run is told: its sections, their bounds, mesh shapes."""
