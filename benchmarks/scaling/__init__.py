"""The cost of labels: predicted, counted and measured."""
