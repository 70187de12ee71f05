"""Text tasks over pairs of Hugging Face models: xsum (the paper's summarization) and any other documents."""
