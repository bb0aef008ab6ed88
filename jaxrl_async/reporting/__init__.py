"""What a run says of itself: metrics, timelines, summary, progress."""
