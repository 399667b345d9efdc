"""What models are evaluated on, and what their grades say."""
