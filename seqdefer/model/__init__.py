"""A fitted pair at work: generate, stream, decide and calibrate at a budget."""
