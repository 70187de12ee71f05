"""Text: pairs of Hugging Face models, a cheap one that writes and a dearer one that takes over token by token."""
