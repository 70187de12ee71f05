"""Speech to text: a small Whisper listens, a large one helps."""
