"""From scores to decisions: policies, what settings spend, and the rules that choose a setting for a budget."""
