"""What a run writes down and shows: metrics, timeline, completions, provenance. No torch."""
